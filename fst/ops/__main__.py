"""Print which backends there are, and what can run here: ``python -m fst.ops``."""

from fst.backends import describe

if __name__ == "__main__":
    print(describe())
