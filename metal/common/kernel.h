// How .metal files end: with the kernels that they give the host, below the line
//   // ---- kernels
// A metallib has them all. Where MLX compiles source instead, the host cuts the file there and asks
// for one kernel alone (csrc/common/kernel_source.cpp); tools/embed_metal.py lists them for it.
#pragma once

// MLX_ANVIL_KERNEL("name for the host", function<template arguments>)
#define MLX_ANVIL_KERNEL(name, ...) \
  template [[host_name(name)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;
