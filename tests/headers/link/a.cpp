// SPDX-License-Identifier: Apache-2.0
#include "use_host.hpp"

double unit_a();
double unit_a() { return use_host(); }
