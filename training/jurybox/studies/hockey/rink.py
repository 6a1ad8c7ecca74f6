"""The rink: two rackets and a puck under Box2D, without rules or rewards.

Lengths are in units of which the rink is about 8 x 6.7, with the centre at (0, 0), y up; times in seconds, 50 steps a
second. Player 0 is on the left. Actions are in the player's *own frame*: forward is +x for both, so player 1's
frame is rotated by 180 degrees.

The figures (sizes, masses, damping, forces) are those measured on the public hockey environment of the Martius lab
(github.com/martius-lab/hockey-env 2.6), so that policies transfer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
from Box2D import b2CircleShape, b2ContactListener, b2Filter, b2FixtureDef, b2PolygonShape, b2World

FPS = 50
STEP = 1.0 / FPS
_PIXELS = 60.0  # of the original's window, in which its lengths are round numbers
_VELOCITY_ITERATIONS, _POSITION_ITERATIONS = 180, 60

WALL_Y, WALL_HALF_LENGTH, WALL_HALF_WIDTH = 3.5, 250 / _PIXELS, 10 / _PIXELS
WALL_X = 245 / _PIXELS  # centre of the side walls
MOUTH, MOUTH_INSIDE = 75 / _PIXELS, 82 / _PIXELS  # half the goal's width at its back, and where the rink opens into it
GOAL_X, GOAL_DEPTH = 245 / _PIXELS, 20 / _PIXELS  # where the goals' boxes begin, and how deep they are
PUCK_RADIUS = 13 / _PIXELS
_SKIN = 0.01  # distance at which polygons touch in Box2D
_REACH = PUCK_RADIUS + _SKIN
IN_GOAL = GOAL_X - _REACH  # a puck this far from the centre line touches a goal's box
# Front flat, back round; the vertex at -12 reproduces the measured mass of 58 and inertia of 4.58.
RACKET = tuple(
    (x / _PIXELS, y / _PIXELS)
    for x, y in ((6, 24), (-12, 24), (-21.6, 12), (-25.2, 0), (-21.6, -12), (-12, -24), (6, -24))
)

FORCE, TORQUE = 6000.0, 400.0
DAMPING, BRAKE_DAMPING, TOP_SPEED = 5.0, 20.0, 10.0
ANGULAR_DAMPING, ANGULAR_BRAKE_DAMPING, MAX_ANGLE = 2.0, 10.0, math.pi / 3
_TURN_BACK = 0.1  # share of the excess angle, and of the outward speed, that each step removes
CENTRE_ZONE, BACK_LINE, SIDE_LINE = 0.5, 3.5, 2.8
PUCK_DAMPING, FAST_PUCK_DAMPING, FAST_PUCK = 0.05, 10.0, 25.0
SHOT_SPEED, HOLD_STEPS = 60.0, 15
_AT_REST = 0.1  # a puck that moves away no faster than this is caught

SIDES = (1.0, -1.0)  # factors between a player's own frame and the rink's

# What collides with what: rackets and puck with walls, with each other and among themselves; rackets with the goals'
# boxes, into which only the puck may go.
_IS_PUCK, _IS_RACKET, _IS_WALL, _IS_GOAL = 1, 2, 4, 8


class _Touches(b2ContactListener):  # type: ignore[misc]
    """Records whose racket the puck began to touch, and its speed away from that player's goal."""

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

    Attributes:
        players, puck: Box2D bodies.
        hold: for both players, steps until the puck that it holds is shot, including the shot; 0: it holds none.
        caught: for both players, whether it caught the puck in the last step.
        scorer: the player whose puck was in the other's goal when the last step began, or None.

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
        """Reset all bodies; all but the puck are at rest.

        This creates a new world: Box2D keeps impulses of old contacts, so in a reused world a game would depend on the
        game before it and not only on its seed.
        """
        world = b2World(gravity=(0, 0), doSleep=True)
        self._world = world
        self._touches = _Touches()
        world.contactListener = self._touches
        world.CreateStaticBody(fixtures=_walls())
        self.players = tuple(self._player(number, place) for number, place in enumerate((player0, player1)))
        self.puck = world.CreateDynamicBody(
            position=puck,
            linearVelocity=puck_velocity,
            linearDamping=PUCK_DAMPING,
            userData="puck",
            fixtures=b2FixtureDef(
                shape=b2CircleShape(radius=PUCK_RADIUS),
                density=7.0,
                friction=0.1,
                restitution=0.95,
                filter=b2Filter(categoryBits=_IS_PUCK, maskBits=_IS_WALL | _IS_RACKET),
            ),
        )
        self._mass = float(self.players[0].mass)
        self._puck_mass = float(self.puck.mass)
        self.hold = [0, 0]
        self.caught = [False, False]
        self.scorer: int | None = None

    def set_state(self, state: Sequence[float] | npt.NDArray[Any]) -> None:
        """Reset to player 0's observation (see the table in `HockeyGame`): 18 numbers, or 16 without `keep`.

        Example:
            >>> rink = Rink()
            >>> rink.set_state([-3, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, -1.5, 0.2, 20, 0, 0, 0])
            >>> rink.puck.linearVelocity.x
            20.0

        Raises:
            ValueError: another number of values.
        """
        values = [float(value) for value in state]
        if len(values) not in (16, 18):
            raise ValueError(f"expected a state of 18 numbers, or 16 without those of holding, got {len(values)}")
        (x0, y0), (x1, y1) = values[0:2], values[6:8]
        self.reset((x0, y0), (x1, y1), (values[12], values[13]), (values[14], values[15]))
        for number, player in enumerate(self.players):
            angle, vx, vy, spin = values[6 * number + 2 : 6 * number + 6]
            player.angle, player.linearVelocity, player.angularVelocity = angle, (vx, vy), spin
        self.hold = [int(steps) for steps in values[16:]] or [0, 0]

    def _player(self, number: int, place: tuple[float, float]) -> Any:
        side = SIDES[number]
        return self._world.CreateDynamicBody(
            position=place,
            userData=number,
            fixtures=b2FixtureDef(
                shape=b2PolygonShape(vertices=[(side * x, y) for x, y in RACKET]),
                density=200 / 1.2,
                friction=1.0,
                restitution=0.0,
                filter=b2Filter(categoryBits=_IS_RACKET, maskBits=_IS_PUCK | _IS_RACKET | _IS_WALL | _IS_GOAL),
            ),
        )

    def step(self, actions: Sequence[Sequence[float]]) -> None:
        """Advance a fiftieth of a second.

        Args:
            actions: for both players (force x, force y, torque, shoot) in their own frame, from -1 to 1; `shoot` may be
                left out where the puck is not kept.
        """
        self._drive(0, actions[0])
        self._drive(1, actions[1])
        puck = self.puck
        velocity = puck.linearVelocity
        fast = velocity.x**2 + velocity.y**2 > FAST_PUCK**2
        puck.linearDamping = FAST_PUCK_DAMPING if fast else PUCK_DAMPING
        hold, began = self.hold, self._touches.began
        for number in (0, 1):
            if hold[number]:
                self._carry(number, shoot=actions[number][3] > 0.5)
        self.scorer = self._in_goal()
        began.clear()
        self._world.Step(STEP, _VELOCITY_ITERATIONS, _POSITION_ITERATIONS)
        self.caught = [False, False]
        if self.keep:
            for number, away in began:
                if away < _AT_REST and not hold[number]:
                    hold[number] = HOLD_STEPS
                    self.caught[number] = True

    def kick(self, velocity: tuple[float, float]) -> None:
        """Add this to the puck's velocity in the next step."""
        force = self._puck_mass / STEP
        self.puck.ApplyForceToCenter((force * velocity[0], force * velocity[1]), True)

    def _in_goal(self) -> int | None:
        """Return the player who has just scored, or None.

        This compares positions with the box behind the mouth. Box2D's sensors have no continuous collision detection,
        and a puck just shot moves further in a step than the box is deep.
        """
        place = self.puck.position
        x = place.x
        if -IN_GOAL < x < IN_GOAL or math.hypot(min(abs(x) - GOAL_X, 0.0), max(abs(place.y) - MOUTH, 0.0)) > _REACH:
            return None
        return 0 if x > 0 else 1

    def _drive(self, number: int, action: Sequence[float]) -> None:
        body, side = self.players[number], SIDES[number]
        place, velocity = body.position, body.linearVelocity
        x, y, vx, vy = side * place.x, side * place.y, side * velocity.x, side * velocity.y
        force_x, force_y = action[0] * FORCE, action[1] * FORCE
        if x > -CENTRE_ZONE:  # the centre line pushes players back and cancels their own force
            body.linearDamping = BRAKE_DAMPING
            force_x = -((2.0 if vx > 0 else 0.0) + x) * vx * self._mass / STEP
        else:
            speed = vx * vx + vy * vy
            if speed < TOP_SPEED**2:
                body.linearDamping = DAMPING
            else:
                body.linearDamping = BRAKE_DAMPING
                push = STEP / self._mass
                if (vx + push * force_x) ** 2 + (vy + push * force_y) ** 2 >= speed:
                    force_x = force_y = 0.0
        # Stop a player that pushes over a line.
        if (x < -BACK_LINE and force_x < 0) or (x > 0 and force_x > 0):
            force_x = vx = 0.0
            body.linearVelocity = (0.0, side * vy)
        if (y > SIDE_LINE and force_y > 0) or (y < -SIDE_LINE and force_y < 0):
            force_y = 0.0
            body.linearVelocity = (side * vx, 0.0)
        body.ApplyForceToCenter((side * force_x, side * force_y), True)

        angle = body.angle
        if -MAX_ANGLE <= angle <= MAX_ANGLE:
            torque = action[2] * TORQUE
            body.angularDamping = ANGULAR_DAMPING
        else:
            spin = body.angularVelocity
            torque = -_TURN_BACK * self._mass / STEP * (angle + spin if angle * spin > 0 else angle)
            body.angularDamping = ANGULAR_BRAKE_DAMPING
        body.ApplyTorque(torque, True)

    def _carry(self, number: int, *, shoot: bool) -> None:
        """Move a held puck with its holder; the holder, or the end of the hold, shoots it.

        The puck is placed inside the racket, and Box2D pushes it out through the nearest side, the front, without
        adding speed: so after the step it is in front of the racket, and never in a wall.
        """
        body, puck = self.players[number], self.puck
        place, velocity = body.position, body.linearVelocity
        puck.position = (place.x, place.y)  # setting vectors takes ten times as long
        puck.linearVelocity = (velocity.x, velocity.y)
        self.hold[number] -= 1
        if shoot or self.hold[number] == 1:
            self.hold[number] = 0
            speed, angle = SIDES[number] * SHOT_SPEED, body.angle
            self.kick((speed * math.cos(angle), speed * math.sin(angle)))


def _walls() -> list[Any]:
    """The ends, the four side walls with the slanted mouths between them, and the goals' boxes."""
    ends = [b2PolygonShape(box=(WALL_HALF_LENGTH, WALL_HALF_WIDTH, (0.0, y), 0.0)) for y in (-WALL_Y, WALL_Y)]
    inner, outer, beyond = WALL_X - WALL_HALF_WIDTH, WALL_X + WALL_HALF_WIDTH, WALL_Y + 5 / _PIXELS
    corners = ((outer, MOUTH), (inner, MOUTH_INSIDE), (inner, beyond), (outer, beyond))
    sides = [b2PolygonShape(vertices=[(sx * x, sy * y) for x, y in corners]) for sx in (-1, 1) for sy in (-1, 1)]
    middle = GOAL_X + GOAL_DEPTH / 2
    goals = [b2PolygonShape(box=(GOAL_DEPTH / 2, MOUTH, (x, 0.0), 0.0)) for x in (-middle, middle)]
    wall = b2Filter(categoryBits=_IS_WALL, maskBits=_IS_PUCK | _IS_RACKET)
    goal = b2Filter(categoryBits=_IS_GOAL, maskBits=_IS_RACKET)
    return [
        b2FixtureDef(shape=shape, friction=0.1, filter=kind)
        for shapes, kind in (((*ends, *sides), wall), (goals, goal))
        for shape in shapes
    ]
