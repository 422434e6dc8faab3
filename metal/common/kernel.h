// Every .metal file ends with its instantiations, below the line
//   // ---- kernels
// A metallib contains all of them. When MLX compiles from source instead, the host cuts the file at
// that line and appends the one kernel it needs (csrc/common/kernel_source.cpp, from the list that
// tools/embed_metal.py writes).
#pragma once

// MLX_ANVIL_KERNEL("name for the host", function<template arguments>)
#define MLX_ANVIL_KERNEL(name, ...) \
  template [[host_name(name)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;
