"""``python -m workspace``."""

from workspace.cli import main

if __name__ == "__main__":
    main(prog_name="workspace")
