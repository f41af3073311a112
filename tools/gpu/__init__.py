"""Parts of tools/gpu_check.py."""
