// SPDX-License-Identifier: Apache-2.0
// Somebody else's code, compiled and linked with -Ofast: as a shared object it may turn flush-to-zero on when
// it is loaded.

float somebody_elses_sum(const float* values, int count);
float somebody_elses_sum(const float* values, int count) {
  float sum = 0.0f;
  for (int k = 0; k < count; ++k) sum += values[k];
  return sum;
}
