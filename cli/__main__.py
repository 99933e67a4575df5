"""``python -m hybrid_pack.cli``."""

from hybrid_pack.cli.main import main

main()
