"""python -m difftransformer."""

from .cli.main import main

raise SystemExit(main())
