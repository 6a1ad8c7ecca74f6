from typing import Any

import numpy as np
from numpy.typing import NDArray

def gather(table: NDArray[np.uint8], runs: NDArray[np.uint32], out: NDArray[np.uint8]) -> int: ...
def scatter(table: NDArray[np.uint8], runs: NDArray[np.uint32], packed: NDArray[np.uint8]) -> int: ...
