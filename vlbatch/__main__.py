"""``python -m vlbatch``."""

from vlbatch.cli import main

main()
