"""`python -m bench.prediction`, see bench/prediction/predictor.py."""

from bench.prediction.predictor import main

raise SystemExit(main())
