"""``python -m dsv4``."""

from dsv4.cli import main

if __name__ == "__main__":
    main(prog_name="dsv4")
