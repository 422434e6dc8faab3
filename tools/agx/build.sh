#!/usr/bin/env bash
# Builds agx_stats, Mesa's compiler for Apple GPUs as a program, for `python -m mlx_anvil.mslc agx`. Takes some minutes,
# once. The source is Debian's package of Mesa (MIT licence), fetched with apt, or the archive of Mesa 25.0 that
# MLX_ANVIL_MESA names. The program is kept in mslc's cache folder; nothing else is changed on this machine.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
release=trixie
python=${PYTHON:-python3}

fail() { printf 'tools/agx/build.sh: %s\n' "$*" >&2; exit 1; }

missing=()
for tool in cc:gcc c++:g++ ninja:ninja-build flex:flex bison:bison pkg-config:pkg-config xz:xz-utils patch:patch; do
  command -v "${tool%%:*}" >/dev/null || missing+=("${tool##*:}")
done
"$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
[ ${#missing[@]} = 0 ] || fail "these packages are missing: ${missing[*]} (apt-get install ${missing[*]})"

cache="${MLX_ANVIL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/mlx-anvil}/mslc"
mkdir -p "$cache"
work=$(mktemp -d "$cache/agx-build.XXXXXX")
trap 'rm -rf "$work"' EXIT

# apt with lists of its own: the system's sources need not name Debian's source packages.
fetch() {
  command -v apt-get >/dev/null || fail "there is no apt-get: give an archive of Mesa 25.0 as MLX_ANVIL_MESA=FILE.tar.xz"
  local site
  site=$(apt-get indextargets --format '$(REPO_URI)' 'Origin: Debian' 'Component: main' | grep -v security | head -n 1)
  [ -n "$site" ] || fail "apt knows no Debian archive: give an archive of Mesa 25.0 as MLX_ANVIL_MESA=FILE.tar.xz"
  mkdir -p "$work/lists/partial" "$work/apt/archives/partial"
  local keys=/usr/share/keyrings/debian-archive-keyring.gpg
  [ -f "$keys" ] || fail "these packages are missing: debian-archive-keyring"
  printf 'deb-src [signed-by=%s] %s %s main\n' "$keys" "$site" "$release" >"$work/sources.list"
  local apt=(apt-get -qq -o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=-
    -o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/apt" -o APT::Sandbox::User=root)
  "${apt[@]}" update || fail "apt-get could not read the list of Debian's source packages"
  (cd "$work" && "${apt[@]}" source --download-only mesa) || fail "apt-get could not fetch Mesa's source package"
}

if [ -n "${MLX_ANVIL_MESA:-}" ]; then
  archive=$MLX_ANVIL_MESA
  [ -f "$archive" ] || fail "MLX_ANVIL_MESA is '$archive', which is not a file"
else
  fetch
  archive=$(echo "$work"/mesa_*.orig.tar.xz)
fi

echo "unpacking $(basename "$archive")"
mkdir "$work/mesa"
tar -xf "$archive" -C "$work/mesa" --strip-components=1
cd "$work/mesa"
patch --silent -p1 <"$here/mesa.patch" || fail "mesa.patch does not fit this Mesa; it is for 25.0"
cp "$here/meson.build" src/asahi/meson.build
mkdir src/asahi/anvil
cp "$here"/*.c src/asahi/anvil/

echo "compiling (log: $cache/agx-build.log)"
"$python" -m venv "$work/venv"
export PATH="$work/venv/bin:$PATH"
options=(-Ddebug=false -Doptimization=1 -Db_ndebug=false -Dtools=asahi -Dvulkan-drivers= -Dgallium-drivers= -Dplatforms=
  -Dvideo-codecs= -Dopengl=false -D{glx,egl,gbm,gles1,gles2,llvm}=disabled
  -D{shader-cache,xmlconfig,expat,zstd,libunwind,valgrind,lmsensors}=disabled)
# With assertions (b_ndebug): what Mesa does not expect must not become a number in a table.
build() {
  pip install --quiet 'meson>=1.4' mako pyyaml packaging &&
    meson setup "$work/build" "${options[@]}" &&
    ninja -C "$work/build" src/asahi/agx_stats
}
build >"$cache/agx-build.log" 2>&1 || { tail -n 20 "$cache/agx-build.log" >&2; fail "Mesa could not be built, see above"; }
strip -o "$cache/agx_stats.new" "$work/build/src/asahi/agx_stats"
mv "$cache/agx_stats.new" "$cache/agx_stats"
echo "built $cache/agx_stats"
