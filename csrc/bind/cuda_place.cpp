#include "bind/cuda_arguments.h"
#include "cuda/peers/peers.h"

namespace swiftspec::binding {

Place gpu() { return {true, cuda::current_device()}; }

}  // namespace swiftspec::binding
