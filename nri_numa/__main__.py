"""``python -m nri_numa`` is ``nri-numa``."""

from nri_numa.cli import main

if __name__ == "__main__":
    main()
