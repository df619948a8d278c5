"""`python -m remat`."""

from remat.cli import main

raise SystemExit(main())
