// SPDX-License-Identifier: Apache-2.0
#include "run_host.hpp"

template mlp::Result mlp::run_host_in<mlp::Bf16Fp32Grads>(const mlp::Run&);
