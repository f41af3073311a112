"""What tools/gpu_check.py is made of."""
