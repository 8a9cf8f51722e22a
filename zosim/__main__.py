"""``python -m zosim``: the same command as ``zosim``."""

from zosim.cli import main

if __name__ == "__main__":
    main()
