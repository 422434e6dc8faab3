import os, sys
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "distributed"))
import ranks
def results(function, processes, *arguments, seconds=300):
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    return ranks.results(function, processes, *arguments, seconds=seconds, environment=[own] * processes)
