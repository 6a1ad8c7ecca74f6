"""The rink: two rackets and a puck under Box2D, without rules or rewards.

Lengths are in units of which the rink is about 8 x 6.7, with the centre at (0, 0), y up; times in seconds, 50 steps a
second. Player 0 is on the left. What a player does is told in its *own frame*: forward is +x for both, so player 1's
frame is turned by 180 degrees.

The figures (sizes, masses, damping, forces) are those measured on the public hockey environment of the Martius lab
(github.com/martius-lab/hockey-env 2.6), so that what is learned here plays there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from Box2D import b2CircleShape, b2ContactListener, b2FixtureDef, b2PolygonShape, b2World

FPS = 50
STEP = 1.0 / FPS
_PIXELS = 60.0  # of the original's window, in which its lengths are round numbers
_VELOCITY_ITERATIONS, _POSITION_ITERATIONS = 180, 60

WALL_Y, WALL_HALF_LENGTH, WALL_HALF_WIDTH = 3.5, 250 / _PIXELS, 10 / _PIXELS
WALL_X, MOUTH = 245 / _PIXELS, 75 / _PIXELS  # centre of the side walls; half the goal's width
GOAL_X = WALL_X + WALL_HALF_WIDTH  # where the goals' boxes begin
PUCK_RADIUS = 13 / _PIXELS
# Front flat, back round; the vertex at -12 is where the measured mass of 58 and inertia of 4.58 come out.
RACKET = tuple(
    (x / _PIXELS, y / _PIXELS)
    for x, y in ((6, 24), (-12, 24), (-21.6, 12), (-25.2, 0), (-21.6, -12), (-12, -24), (6, -24))
)
RACKET_FRONT = 6 / _PIXELS

FORCE, TORQUE = 6000.0, 400.0
DAMPING, BRAKE_DAMPING, TOP_SPEED = 5.0, 20.0, 10.0
ANGULAR_DAMPING, ANGULAR_BRAKE_DAMPING, MAX_ANGLE = 2.0, 10.0, math.pi / 3
_ANGLE_SPRING, _ANGLE_BRAKE = 2500.0, 60.0  # torque per radian beyond the limit, and per radian a second outwards
CENTRE_ZONE, BACK_LINE, SIDE_LINE = 0.5, 3.5, 2.8
PUCK_DAMPING, FAST_PUCK_DAMPING, FAST_PUCK = 0.05, 10.0, 25.0
SHOT_SPEED, HOLD_STEPS = 60.0, 15
_AT_REST = 0.1  # a puck that moves away no faster than this is caught

SIDES = (1.0, -1.0)  # what turns a player's own frame into the rink's, and back


class _Touches(b2ContactListener):  # type: ignore[misc]
    """Remembers whose racket the puck began to touch, and how fast it was moving away from that player's goal."""

    def __init__(self) -> None:
        super().__init__()
        self.began: list[tuple[int, float]] = []

    def BeginContact(self, contact: Any) -> None:  # noqa: N802  (Box2D's name)
        first, second = contact.fixtureA.body, contact.fixtureB.body
        for racket, puck in ((first, second), (second, first)):
            player = racket.userData
            if player in (0, 1) and puck.userData == "puck":
                self.began.append((player, SIDES[player] * puck.linearVelocity.x))


class Rink:
    """One game's bodies.

    Args:
        keep: whether a player that touches the puck holds it (and may shoot it). Without, the puck only bounces off.
    """

    def __init__(self, *, keep: bool = True) -> None:
        self.keep = keep
        self.reset((-3.0, 0.0), (3.0, 0.0), (0.0, 0.0), (0.0, 0.0))

    def reset(
        self,
        player0: tuple[float, float],
        player1: tuple[float, float],
        puck: tuple[float, float],
        puck_velocity: tuple[float, float],
    ) -> None:
        """Everything at its place and at rest but the puck.

        The world is made anew: Box2D keeps impulses of old contacts, so a world that is used again would remember the
        game before, and a game would not be a function of its seed.
        """
        world = b2World(gravity=(0, 0), doSleep=True)
        self._world = world
        self._touches = _Touches()
        world.contactListener = self._touches
        sides = [
            b2PolygonShape(box=(WALL_HALF_WIDTH, (WALL_Y - MOUTH) / 2, (x, sign * (WALL_Y + MOUTH) / 2), 0.0))
            for x in (-WALL_X, WALL_X)
            for sign in (-1, 1)
        ]
        ends = [b2PolygonShape(box=(WALL_HALF_LENGTH, WALL_HALF_WIDTH, (0.0, y), 0.0)) for y in (-WALL_Y, WALL_Y)]
        world.CreateStaticBody(fixtures=[b2FixtureDef(shape=shape, friction=0.1) for shape in (*sides, *ends)])
        self.players = tuple(self._player(number, place) for number, place in enumerate((player0, player1)))
        self.puck = world.CreateDynamicBody(
            position=puck,
            linearVelocity=puck_velocity,
            linearDamping=PUCK_DAMPING,
            userData="puck",
            fixtures=b2FixtureDef(shape=b2CircleShape(radius=PUCK_RADIUS), density=7.0, friction=0.1, restitution=0.95),
        )
        self._mass = float(self.players[0].mass)
        self._puck_mass = float(self.puck.mass)
        self.hold = [0, 0]
        self.caught = [False, False]

    def _player(self, number: int, place: tuple[float, float]) -> Any:
        side = SIDES[number]
        return self._world.CreateDynamicBody(
            position=place,
            linearDamping=DAMPING,
            angularDamping=ANGULAR_DAMPING,
            userData=number,
            fixtures=b2FixtureDef(
                shape=b2PolygonShape(vertices=[(side * x, y) for x, y in RACKET]),
                density=200 / 1.2,
                friction=1.0,
                restitution=0.0,
                groupIndex=-1,  # rackets do not collide with each other: each is kept in its half
            ),
        )

    def step(self, actions: Sequence[Sequence[float]]) -> None:
        """A fiftieth of a second.

        Args:
            actions: for both players (force x, force y, torque, shoot) in their own frame, from -1 to 1; `shoot` may be
                left out where the puck is not kept.
        """
        for number in (0, 1):
            self._drive(number, actions[number])
        velocity = self.puck.linearVelocity
        fast = velocity.x**2 + velocity.y**2 > FAST_PUCK**2
        self.puck.linearDamping = FAST_PUCK_DAMPING if fast else PUCK_DAMPING
        if self.keep:
            for number in (0, 1):
                if self.hold[number]:
                    self._carry(number, shoot=actions[number][3] > 0.5)
        self._touches.began.clear()
        self._world.Step(STEP, _VELOCITY_ITERATIONS, _POSITION_ITERATIONS)
        self._world.ClearForces()
        self.caught = [False, False]
        if self.keep:
            for number, away in self._touches.began:
                if away < _AT_REST and not any(self.hold):
                    self.hold[number] = HOLD_STEPS
                    self.caught[number] = True
                    self.puck.fixtures[0].sensor = True

    @property
    def scorer(self) -> int | None:
        """The player whose puck is in the other's goal.

        The box behind the mouth is looked at by place and not with a Box2D sensor: those have no continuous
        collision, and a puck just shot moves further in a step than the box is deep.
        """
        x = float(self.puck.position.x)
        return None if abs(x) <= GOAL_X - PUCK_RADIUS else 0 if x > 0 else 1

    def _drive(self, number: int, action: Sequence[float]) -> None:
        body, side = self.players[number], SIDES[number]
        x, y = body.position
        vx, vy = body.linearVelocity
        x, y, vx, vy = side * x, side * y, side * vx, side * vy
        force_x, force_y = action[0] * FORCE, action[1] * FORCE
        damping = DAMPING
        if vx * vx + vy * vy >= TOP_SPEED**2:
            damping = BRAKE_DAMPING
            if force_x * vx + force_y * vy > 0:
                force_x = force_y = 0.0
        if x > -CENTRE_ZONE:
            damping = BRAKE_DAMPING
            force_x = -2.0 * self._mass * vx / STEP if vx > 0 else min(force_x, 0.0)
        elif x < -BACK_LINE:
            force_x = max(force_x, 0.0)
        if abs(y) > SIDE_LINE and force_y * y > 0:
            force_y = 0.0
        body.linearDamping = damping
        body.ApplyForceToCenter((side * force_x, side * force_y), True)

        angle, spin = body.angle, body.angularVelocity
        if abs(angle) > MAX_ANGLE:
            torque = -_ANGLE_SPRING * (angle - math.copysign(MAX_ANGLE, angle))
            if angle * spin > 0:
                torque -= _ANGLE_BRAKE * spin
            body.angularDamping = ANGULAR_BRAKE_DAMPING
        else:
            torque = action[2] * TORQUE
            body.angularDamping = ANGULAR_DAMPING
        body.ApplyTorque(torque, True)

    def _carry(self, number: int, *, shoot: bool) -> None:
        """The puck goes where its holder goes; the last step of a hold, or the holder, shoots it."""
        body, puck = self.players[number], self.puck
        self.hold[number] -= 1
        puck.linearVelocity = body.linearVelocity
        puck.angularVelocity = 0.0
        if self.hold[number] and not shoot:
            puck.position = body.position
            return
        self.hold[number] = 0
        puck.fixtures[0].sensor = False
        cos, sin = SIDES[number] * math.cos(body.angle), SIDES[number] * math.sin(body.angle)
        # It leaves from before the racket: from within, Box2D would first push the two apart.
        reach = RACKET_FRONT + PUCK_RADIUS
        x, y = body.position
        puck.position = (x + reach * cos, y + reach * sin)
        impulse = self._puck_mass * SHOT_SPEED
        puck.ApplyLinearImpulse((impulse * cos, impulse * sin), puck.worldCenter, True)
