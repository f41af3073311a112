// Tree attention, device code without the launches: the keys of each row, and the work of a warp or thread in each
// step. Also compiles as host code, so that tests run the whole kernel on a CPU (tests/native/attention_driver.cpp).
//
// A row's keys are numbered in the order of their positions. Key number i lies in slot i as long as the row sees every
// slot before it; from there on the row's own list names it. Keys go in tiles of 128, one to a block; eight tiles are a
// cluster's part. On GPUs without clusters tiles have 64 keys, and a part is one block's. Where a key counts in the
// sums follows from its number: tile i / 128, warp and fragment from i % 128. So a row's result does not depend, to the
// bit, on the other rows, nor on where its keys lie.
//
// Rows that share a sequence shape groups of up to 64 columns, a row's heads side by side: they are the N of the MMA,
// keys and then dimensions are its M. A tile is loaded in units of 16 keys: those that all rows of the group see in the
// same slots once, the others for each row. Of a cache of float8 a unit becomes bfloat16 when it has come, where it
// lies: all that follows is the same.
#pragma once

// in the order in which they are best read
// clang-format off
#include "cuda/attention/sizes.h"
#include "cuda/attention/key_lists.h"
#include "cuda/attention/tile.h"
#include "cuda/attention/load.h"
#include "cuda/attention/products.h"
#include "cuda/attention/block.h"
#include "cuda/attention/combine.h"
// clang-format on
