// The Metal source of the kernels, as it travels inside the extension: what MLX compiles at run
// time where there is no metallib, and what the simulator and the tests read.
#pragma once

#include <span>
#include <string>
#include <vector>

namespace mlx_anvil {

// Written by tools/embed_metal.py when the library is built.
struct MetalFile {
  const char* path;  // "metal/<folder>/<name>"
  const char* text;
};
struct MetalKernel {
  const char* name;
  const char* file;      // the .metal file that has it
  const char* instance;  // "function<template arguments>"
};
std::span<const MetalFile> metal_files();
std::span<const MetalKernel> metal_kernels();

// The names of an op's kernels; none where there is no such op.
std::vector<std::string> kernel_names(const std::string& op);

// The source of all kernels of `op`, includes resolved; empty where there is no such op.
std::string op_source(const std::string& op);

// The paths of all .metal files: "metal/<op>/<name>.metal".
std::vector<std::string> metal_file_names();

// The source of one of them with all its kernels, includes resolved. Throws where there is none.
std::string file_source(const std::string& path);

// The source of this kernel alone, includes resolved. Throws where there is none of this name.
std::string kernel_source(const std::string& name);

}  // namespace mlx_anvil
