"""The profile phase: measures a pair on a machine, keeps the result for serve, reports it, predicts other machines."""
