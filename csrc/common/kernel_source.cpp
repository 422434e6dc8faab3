#include "common/kernel_source.h"

#include <algorithm>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string_view>

namespace mlx_anvil {

namespace {

// The kernels of a .metal file follow this line; see metal/common/kernel.h.
constexpr std::string_view kKernelsLine = "// ---- kernels\n";
constexpr std::string_view kInclude = "#include \"metal/";

std::string_view text_of(std::string_view path) {
  for (const MetalFile& file : metal_files()) {
    if (path == file.path) {
      return file.text;
    }
  }
  throw std::invalid_argument("no Metal source " + std::string(path) + ".");
}

// Expands our includes, each on its first use. Line markers make compiler messages point to the
// original files.
class Resolver {
 public:
  void add(std::string_view path, std::string_view text) {
    out_ << "#line 1 \"" << path << "\"\n";
    for (int line = 1; !text.empty(); ++line) {
      const size_t end = text.find('\n');
      const std::string_view content = text.substr(0, end);
      text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
      if (content.starts_with(kInclude)) {
        const size_t first = content.find('"') + 1;
        const std::string included(content.substr(first, content.rfind('"') - first));
        if (seen_.insert(included).second) {
          add(included, text_of(included));
          out_ << "#line " << line + 1 << " \"" << path << "\"\n";
          continue;
        }
      } else if (content != "#pragma once") {
        out_ << content;
      }
      out_ << '\n';  // preserves line numbers
    }
  }
  std::ostringstream& out() { return out_; }

 private:
  std::ostringstream out_;
  std::set<std::string> seen_;
};

bool has_kernels(std::string_view path) {
  return path.ends_with(".metal");
}

bool is_of_op(std::string_view path, const std::string& op) {
  return path.starts_with("metal/" + op + "/");
}

}  // namespace

std::vector<std::string> kernel_names(const std::string& op) {
  std::vector<std::string> names;
  for (const MetalKernel& kernel : metal_kernels()) {
    if (is_of_op(kernel.file, op)) {
      names.emplace_back(kernel.name);
    }
  }
  return names;
}

std::string op_source(const std::string& op) {
  Resolver resolver;
  for (const MetalFile& file : metal_files()) {
    if (is_of_op(file.path, op) && has_kernels(file.path)) {
      resolver.add(file.path, file.text);
    }
  }
  return resolver.out().str();
}

std::vector<std::string> metal_file_names() {
  std::vector<std::string> names;
  for (const MetalFile& file : metal_files()) {
    if (has_kernels(file.path)) {
      names.emplace_back(file.path);
    }
  }
  return names;
}

std::string file_source(const std::string& path) {
  Resolver resolver;
  resolver.add(path, text_of(path));
  return resolver.out().str();
}

std::string kernel_source(const std::string& name) {
  const std::span<const MetalKernel> kernels = metal_kernels();
  const auto kernel = std::find_if(kernels.begin(), kernels.end(),
                                   [&](const MetalKernel& k) { return name == k.name; });
  if (kernel == kernels.end()) {
    throw std::invalid_argument("there is no kernel " + name + ".");
  }
  const std::string_view text = text_of(kernel->file);
  Resolver resolver;
  resolver.add(kernel->file, text.substr(0, text.find(kKernelsLine)));
  resolver.out() << "template [[host_name(\"" << name << "\")]] [[kernel]] decltype("
                 << kernel->instance << ") " << kernel->instance << ";\n";
  return resolver.out().str();
}

}  // namespace mlx_anvil
