#include "commit_rows.h"

// clang-format off
instantiate_kernel("commit_rows_8", commit_rows, uchar)
instantiate_kernel("commit_rows_16", commit_rows, ushort)
instantiate_kernel("commit_rows_32", commit_rows, uint)
instantiate_kernel("commit_rows_128", commit_rows, uint4) // clang-format on
