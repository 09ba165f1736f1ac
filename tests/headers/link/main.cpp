// SPDX-License-Identifier: Apache-2.0
#include <cstdio>

double unit_a();
double unit_b();
#ifdef WITH_CUDA
double unit_c();
double unit_d();
#else
inline double unit_c() { return unit_a(); }
inline double unit_d() { return unit_b(); }
#endif

int main() {
  const double results[] = {unit_a(), unit_b(), unit_c(), unit_d()};
  for (double result : results) {
    if (result != results[0]) return std::puts("the translation units disagree"), 1;
  }
  return std::printf("%a\n", results[0]) < 0 ? 1 : 0;
}
