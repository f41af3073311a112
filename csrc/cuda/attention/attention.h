// Tree attention, device code without the launches: the keys of each row, RoPE and append, and the work of a warp or
// thread in each step. Also compiles as host code, so that tests run the whole kernel on a CPU
// (tests/native/attention_driver.cpp).
//
// The keys of a row are numbered in the order of their slots. Key i lies in slot i as long as the row sees every slot
// before it; from there on the key list of the row (`tail`) names its slot. Keys are processed in tiles of 128, or of 64
// on GPUs without clusters, whose blocks work alone, and where two blocks share a multiprocessor. Each cluster computes a
// part of the tiles of a sequence, and each of its blocks one tile after the other, as an online softmax. The position of
// a key in the sums follows from its number: part and turn from the number of its turn (sizes.h), block and place in the
// tile from the number of its unit of 16 keys in the turn, since units are dealt to the blocks one by one. So a row's
// result is bitwise independent of the other rows and of the slots in which its keys lie.
//
// Rows of the same sequence form groups of up to 64 columns, the heads of a row next to each other: columns are the N
// of the MMA, keys and then dimensions its M. A tile is loaded in units of 16 keys: units that all rows of the group
// see in the same slots are loaded once, the others for each row. A unit of a float8 cache is converted to bfloat16 in
// place after it has been loaded; the steps after that are the same.
#pragma once

// in reading order
// clang-format off
#include "cuda/attention/sizes.h"
#include "cuda/attention/key_lists.h"
#include "cuda/attention/rope_append.h"
#include "cuda/attention/tile.h"
#include "cuda/attention/load.h"
#include "cuda/attention/products.h"
#include "cuda/attention/block.h"
#include "cuda/attention/combine.h"
// clang-format on
