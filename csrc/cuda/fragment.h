// Register layout of the fragments of mma.m16n8k16, 16 x 16 times 16 x 8 (PTX ISA, "Matrix Fragments for
// mma.m16n8k16"). For host code and device code.
//
// A: register i holds columns a_column and a_column + 1 of row a_row. B: register i holds rows b_row and b_row + 1 of
// column b_column. C and D: register i holds row c_row, column c_column.
#pragma once

#include "common/host_device.h"

namespace swiftspec::fragment {

SWIFTSPEC_HD int a_row(int lane, int i) { return lane / 4 + i % 2 * 8; }
SWIFTSPEC_HD int a_column(int lane, int i) { return lane % 4 * 2 + i / 2 * 8; }
SWIFTSPEC_HD int b_row(int lane, int i) { return lane % 4 * 2 + i * 8; }
SWIFTSPEC_HD int b_column(int lane) { return lane / 4; }
SWIFTSPEC_HD int c_row(int lane, int i) { return lane / 4 + i / 2 * 8; }
SWIFTSPEC_HD int c_column(int lane, int i) { return lane % 4 * 2 + i % 2; }

}  // namespace swiftspec::fragment
