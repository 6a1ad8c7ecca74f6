"""Hockey for two on a small rink, with the physical parameters of the Martius lab's hockey environment."""

from jurybox.studies.hockey.bots import BOTS, Bot, Opponent, RandomPlayer, make_opponent
from jurybox.studies.hockey.game import Game, GameStep, HockeyGame, Mode
from jurybox.studies.hockey.games import HockeyGames, Standing, evaluate, play
from jurybox.studies.hockey.original import make_game

__all__ = [
    "BOTS",
    "Bot",
    "Game",
    "GameStep",
    "HockeyGame",
    "HockeyGames",
    "Mode",
    "Opponent",
    "RandomPlayer",
    "Standing",
    "evaluate",
    "make_game",
    "make_opponent",
    "play",
]
