// SPDX-License-Identifier: Apache-2.0
// The host's program, its host code handed through nvcc.
#include "host.cpp"
