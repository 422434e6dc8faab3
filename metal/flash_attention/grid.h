// Maps a threadgroup of the forward or backward kernels to its block of rows.
#pragma once

#include <metal_stdlib>

// True: heads lie along x of the grid and blocks of rows along y. False: the reverse. Threadgroups
// start along x first. With heads along x, the long blocks of a causal call start first for every
// head, and the short ones fill the tail.
constant bool heads_are_along_x [[function_constant(9)]];

struct GridPlace {
  int block;
  int blocks;  // per head
  int head;
  int batch;
};

METAL_FUNC GridPlace place_in_grid(uint3 group, uint3 groups) {
  if (heads_are_along_x) {
    return {int(group.y), int(groups.y), int(group.x), int(group.z)};
  }
  return {int(group.x), int(groups.x), int(group.y), int(group.z)};
}
