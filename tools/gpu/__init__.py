"""Parts of tools/gpu_queue.py."""
