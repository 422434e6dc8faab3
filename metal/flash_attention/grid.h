// Which rows a threadgroup of the forward or of a gradient has.
#pragma once

#include <metal_stdlib>

// Whether heads lie along x of the grid and blocks of rows along y, or the reverse. Threadgroups
// along x start first: with heads there, the long blocks of a causal call are under way before the
// short ones of any head, which then fill the gaps.
constant bool heads_are_along_x [[function_constant(9)]];

struct GridPlace {
  int block;
  int blocks;  // of a head
  long head;
  long batch;
};

METAL_FUNC GridPlace place_in_grid(uint3 group, uint3 groups) {
  if (heads_are_along_x) {
    return {int(group.y), int(groups.y), long(group.x), long(group.z)};
  }
  return {int(group.x), int(groups.x), long(group.y), long(group.z)};
}
