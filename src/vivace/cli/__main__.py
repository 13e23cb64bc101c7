"""``python -m vivace.cli``."""

from vivace.cli import main

if __name__ == "__main__":
    main()
