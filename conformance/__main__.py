"""``python -m conformance`` is the command ``fsdp-conformance``."""

from conformance.cli import main

if __name__ == "__main__":
    main()
