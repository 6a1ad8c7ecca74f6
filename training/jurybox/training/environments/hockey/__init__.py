"""Hockey for two on a small rink, with the physical parameters of the Martius lab's hockey environment."""

from jurybox.training.environments.hockey.bots import BOTS, Bot, Opponent, RandomPlayer, make_opponent
from jurybox.training.environments.hockey.game import Game, HockeyGame, Mode, Turn
from jurybox.training.environments.hockey.matches import Match, Result, play
from jurybox.training.environments.hockey.original import make_game

__all__ = [
    "BOTS",
    "Bot",
    "Game",
    "HockeyGame",
    "Match",
    "Mode",
    "Opponent",
    "RandomPlayer",
    "Result",
    "Turn",
    "make_game",
    "make_opponent",
    "play",
]
