// The precompiled header of every file that includes libtorch (docs/architecture.md, build). Only
// headers that most of those files need belong here; torch/torch.h never does (30 s a file).
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <fmt/format.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>
