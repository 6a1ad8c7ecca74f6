"""Pictures of the game and frames of whole games, drawn with OpenCV in memory, without a display."""

from __future__ import annotations

import math
from functools import lru_cache

import cv2
import numpy as np
import numpy.typing as npt

from jurybox.studies.hockey.game import HockeyGame
from jurybox.studies.hockey.games import HockeyGames, Policy, play
from jurybox.studies.hockey.rink import (
    GOAL_DEPTH,
    GOAL_X,
    HOLD_STEPS,
    MOUTH,
    MOUTH_INSIDE,
    PUCK_RADIUS,
    RACKET,
    SIDES,
    WALL_HALF_WIDTH,
    WALL_X,
    WALL_Y,
)
from jurybox.training.roles.evaluation import Episode

_GOAL_FRAMES = 20  # number of frames that show a goal
Frame = npt.NDArray[np.uint8]
_Colour = tuple[int, int, int]

_NIGHT, _ICE, _BOARD, _EDGE = (24, 30, 42), (236, 243, 248), (52, 64, 84), (203, 213, 225)
_RED, _BLUE, _LINE = (220, 68, 68), (45, 110, 215), (176, 205, 232)
_PLAYERS: tuple[_Colour, _Colour] = (_RED, _BLUE)
_INK, _PUCK, _GLOW = (235, 240, 246), (22, 26, 34), (250, 190, 60)
_SHIFT = 4  # OpenCV takes sixteenths of a pixel: bodies move smoothly
_FONT = cv2.FONT_HERSHEY_DUPLEX


class _Canvas:
    """A picture in the rink's units."""

    def __init__(self, width: int) -> None:
        self.scale = width / 10.0
        self.width, self.height = width, round(8.2 * self.scale)
        # Draw at twice the size and shrink at the end, so that edges are smooth.
        self.zoom = 2
        self.pixels: Frame

    def at(self, x: float, y: float) -> tuple[int, int]:
        unit = self.scale * self.zoom * (1 << _SHIFT)
        return round((x + 5.0) * unit), round((4.45 - y) * unit)

    def size(self, length: float) -> int:
        return max(1, round(length * self.scale * self.zoom))

    def box(self, x0: float, y0: float, x1: float, y1: float, colour: _Colour) -> None:
        self.polygon([(x0, y0), (x1, y0), (x1, y1), (x0, y1)], colour)

    def polygon(self, points: list[tuple[float, float]], colour: _Colour) -> None:
        corners = np.array([self.at(x, y) for x, y in points], np.int32)
        cv2.fillPoly(self.pixels, [corners], colour, cv2.LINE_AA, _SHIFT)

    def disc(self, x: float, y: float, radius: float, colour: _Colour) -> None:
        r = round(radius * self.scale * self.zoom * (1 << _SHIFT))
        cv2.circle(self.pixels, self.at(x, y), r, colour, -1, cv2.LINE_AA, _SHIFT)

    def ring(self, x: float, y: float, radius: float, colour: _Colour, width: float = 0.04) -> None:
        r = round(radius * self.scale * self.zoom * (1 << _SHIFT))
        cv2.circle(self.pixels, self.at(x, y), r, colour, self.size(width), cv2.LINE_AA, _SHIFT)

    def text(self, x: float, y: float, label: str, height: float, colour: _Colour) -> None:
        """Draw text centred at (x, y); `height` is that of a capital."""
        scale = height * self.scale * self.zoom / 21.0
        thick = max(1, round(scale * 1.6))
        (w, h), _ = cv2.getTextSize(label, _FONT, scale, thick)
        unit = self.scale * self.zoom
        place = (round((x + 5.0) * unit - w / 2), round((4.45 - y) * unit + h / 2))
        cv2.putText(self.pixels, label, place, _FONT, scale, colour, thick, cv2.LINE_AA)

    def frame(self) -> Frame:
        small = cv2.resize(self.pixels, (self.width, self.height), interpolation=cv2.INTER_AREA)
        return np.asarray(small, np.uint8)


def draw(
    game: HockeyGame,
    *,
    score: tuple[int, int] | None = None,
    names: tuple[str, str] = ("left", "right"),
    width: int = 640,
) -> Frame:
    """Draw the rink's current state, uint8 (height, width, 3), RGB.

    Args:
        score: goals so far, written above.
        names: of the players, beside it.
        width: in pixels; the height follows.
    """
    canvas = _Canvas(width)
    canvas.pixels = _empty(width).copy()
    rink = game.rink
    for number in (0, 1):
        _player(canvas, game, number)
    x, y = rink.puck.position
    canvas.disc(x + 0.04, y - 0.05, PUCK_RADIUS, (190, 201, 212))
    canvas.disc(x, y, PUCK_RADIUS, _PUCK)
    canvas.ring(x, y, PUCK_RADIUS * 0.6, (70, 78, 92), 0.03)
    _board(canvas, game, score, names)
    return canvas.frame()


@lru_cache(4)
def _empty(width: int) -> Frame:
    """The rink without bodies, as large as it is drawn: most of a picture's work, and the same in all of a film."""
    canvas = _Canvas(width)
    canvas.pixels = np.full((canvas.height * canvas.zoom, canvas.width * canvas.zoom, 3), _NIGHT, np.uint8)
    inner_x, inner_y = WALL_X - WALL_HALF_WIDTH, WALL_Y - WALL_HALF_WIDTH
    outer_x, outer_y = WALL_X + WALL_HALF_WIDTH, WALL_Y + WALL_HALF_WIDTH
    canvas.box(-outer_x, -outer_y, outer_x, outer_y, _BOARD)
    canvas.box(-inner_x, -inner_y, inner_x, inner_y, _ICE)
    for side, colour in ((-1, _PLAYERS[0]), (1, _PLAYERS[1])):
        pale = tuple(round(0.86 * ice + 0.14 * own) for ice, own in zip(_ICE, colour, strict=True))
        canvas.disc(side * inner_x, 0.0, 1.45, (pale[0], pale[1], pale[2]))
        canvas.ring(side * inner_x, 0.0, 1.45, colour, 0.03)
        # Cover the part of the crease outside the rink; the mouth stays open.
        canvas.box(side * inner_x, -inner_y, side * outer_x, inner_y, _BOARD)
        canvas.box(side * outer_x, -inner_y, side * 5.0, inner_y, _NIGHT)
        mouth = [(inner_x, -MOUTH_INSIDE), (outer_x, -MOUTH), (outer_x, MOUTH), (inner_x, MOUTH_INSIDE)]
        canvas.polygon([(side * x, y) for x, y in mouth], _ICE)
        canvas.box(side * GOAL_X, -MOUTH, side * (GOAL_X + GOAL_DEPTH), MOUTH, colour)
        for y in (-MOUTH_INSIDE, MOUTH_INSIDE):
            canvas.disc(side * inner_x, y, 0.07, _EDGE)
    canvas.box(-0.03, -inner_y, 0.03, inner_y, _LINE)
    canvas.ring(0.0, 0.0, 0.9, _LINE, 0.05)
    canvas.disc(0.0, 0.0, 0.09, _LINE)
    return canvas.pixels


def _player(canvas: _Canvas, game: HockeyGame, number: int) -> None:
    body, side = game.rink.players[number], SIDES[number]
    x, y = body.position
    cos, sin = math.cos(body.angle), math.sin(body.angle)

    def turned(scale: float, dx: float = 0.0, dy: float = 0.0) -> list[tuple[float, float]]:
        return [
            (x + dx + scale * (cos * side * px - sin * py), y + dy + scale * (sin * side * px + cos * py))
            for px, py in RACKET
        ]

    dark = tuple(round(0.6 * part) for part in _PLAYERS[number])
    canvas.polygon(turned(1.0, 0.05, -0.06), (190, 201, 212))
    canvas.polygon(turned(1.0), (dark[0], dark[1], dark[2]))
    canvas.polygon(turned(0.8), _PLAYERS[number])
    if left := game.rink.hold[number]:
        angle = 360 * left / HOLD_STEPS
        size = canvas.size(0.5)
        centre = tuple(value >> _SHIFT for value in canvas.at(x, y))
        cv2.ellipse(canvas.pixels, centre, (size, size), -90, 0, angle, _GLOW, canvas.size(0.06), cv2.LINE_AA)


def _board(canvas: _Canvas, game: HockeyGame, score: tuple[int, int] | None, names: tuple[str, str]) -> None:
    if score is not None:
        canvas.text(0.0, 4.08, f"{score[0]} : {score[1]}", 0.34, _INK)
    for x, name, colour in ((-2.7, names[0], _PLAYERS[0]), (2.7, names[1], _PLAYERS[1])):
        canvas.text(x, 4.08, name[:18], 0.22, colour)
    share = game.taken / game.max_steps
    canvas.box(-4.25, 3.72, 4.25, 3.76, _BOARD)
    canvas.box(-4.25, 3.72, -4.25 + 8.5 * max(0.0, 1.0 - share), 3.76, _EDGE)


def film(
    policy: Policy,
    opponent: str | Policy,
    *,
    games: int = 3,
    names: tuple[str, str] = ("policy", "opponent"),
    width: int = 640,
    every: int = 1,
) -> list[Frame]:
    """Return frames of a few games, `policy` on the left.

    Args:
        opponent: the name of a bot, or another policy.
        every: steps between two frames: 1 for 50 frames a second.
    """
    game, score, frames = HockeyGame(), [0, 0], list[Frame]()

    def shot() -> None:
        if game.taken and game.taken % every == 0 and not game.over:
            frames.append(draw(game, score=(score[0], score[1]), names=names, width=width))

    def ended(episode: Episode) -> None:
        score[0] += int(episode.numbers["wins"])
        score[1] += int(episode.numbers["losses"])
        last = draw(game, score=(score[0], score[1]), names=names, width=width)
        frames.extend([last] * (1 + _GOAL_FRAMES // every))

    chances = [int(np.random.default_rng((0, number)).integers(2**30)) for number in range(games)]
    seeds = [2 * chance + number % 2 for number, chance in enumerate(chances)]
    play(HockeyGames(games=[game]), seeds, policy, opponent, ended=ended, alive=shot)
    return frames
