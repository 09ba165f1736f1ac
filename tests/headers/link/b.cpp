// SPDX-License-Identifier: Apache-2.0
#include "use_host.hpp"

double unit_b();
double unit_b() { return use_host(); }
