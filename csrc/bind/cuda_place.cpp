#include "bind/cuda_arguments.h"
#include "cuda/peers/peers.h"

namespace swiftspec::binding {

Device gpu() { return {true, cuda::current_device()}; }

}  // namespace swiftspec::binding
