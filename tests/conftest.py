"""What every test shares."""

import torch

# The models here are tiny: a second thread costs more in barriers than it computes, above all on a busy machine.
torch.set_num_threads(1)
