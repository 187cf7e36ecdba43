#!/usr/bin/env bash
# What cross-compiling HIP needs on Debian and Ubuntu without ROCm: clang 19, the device libraries, HIP's headers, and
# the constants (architecture and code-object version) that Debian's older device libraries lack for newer GPUs.
# A machine with ROCm's own hipcc needs none of this. Does nothing when everything is there.
# Usage: scripts/amd/install_hip_toolchain.sh [--wheel] [PACKAGE...], which are installed too
# --wheel: what scripts/build_wheels --hip takes: clang 22, which knows gfx950, with HIP 7's headers
# and device libraries from Debian's experimental, unpacked into the cache. clang 22 refuses those of clang 19's.
set -euo pipefail
here=$(cd "$(dirname "$0")/../.." && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/sd-ort
clang=19
tree=$cache/hip-tree
libraries=(rocm-device-libs libamdhip64-dev)
if [ "${1:-}" = --wheel ]; then
  clang=22
  tree=$cache/hip-tree-22
  libraries=()
  shift
fi
packages=(g++ "clang-$clang" "lld-$clang" "llvm-$clang" "clang-tools-$clang" "${libraries[@]}" "$@")
missing=()
for package in "${packages[@]}"; do dpkg -s "$package" > /dev/null 2>&1 || missing+=("$package"); done
if [ ${#missing[@]} -gt 0 ]; then
  echo "Installing ${missing[*]}"
  sudo=; [ "$(id -u)" = 0 ] || sudo=sudo
  $sudo apt-get -q update > /dev/null
  DEBIAN_FRONTEND=noninteractive $sudo apt-get -q -y install --no-install-recommends "${missing[@]}" > /dev/null
fi

[ -e "$tree/.complete-3" ] && exit 0
work=$(mktemp -d -p "$(mkdir -p "$cache" && echo "$cache")" .hip-tree-XXXX)
trap 'rm -rf "$work"' EXIT
number() { sed -n "s/^#define HIP_VERSION_$1 *//p" "$work/include/hip/hip_version.h"; }
finish() {
  printf 'HIP_VERSION_MAJOR=%s\nHIP_VERSION_MINOR=%s\nHIP_VERSION_PATCH=%s\n' "$(number MAJOR)" "$(number MINOR)" "$(number PATCH)" |
    tee "$work/bin/.hipVersion" > "$work/share/hip/version"
  touch "$work/.complete-3"
  chmod 755 "$work"
  rm -rf "$tree" && mv "$work" "$tree"
  trap - EXIT
}
mkdir -p "$work/bin" "$work/share/hip"
if [ $clang = 22 ]; then
  PYTHONPATH=$here python3 - "$work" <<'EOF'
import sys
from pathlib import Path
from sd_ort.runtime.debian import DownloadError, unpack_packages
try:
    unpack_packages(("libamdhip64-dev", "rocm-device-libs-22"), ("experimental", "sid"), Path(sys.argv[1]))
except DownloadError as error:
    sys.exit(f"HIP's headers for clang 22 cannot be downloaded: {error}. A Debian with network access is needed.")
EOF
  ln -s usr/include "$work/include"
  ln -s usr/lib/llvm-22/lib/clang/22/amdgcn "$work/amdgcn"
  finish
  exit
fi
bitcode=$work/amdgcn/bitcode
mkdir -p "$bitcode"
cp /usr/lib/x86_64-linux-gnu/amdgcn/bitcode/*.bc "$bitcode/"
layout=$(echo '__attribute__((device)) int x;' | clang-19 -x hip --offload-arch=gfx942 --offload-device-only -nogpulib -nogpuinc \
  -S -emit-llvm - -o - | grep '^target datalayout')
constant() {  # file, symbol, value: a one-constant module that the device libraries are linked with
  llvm-as-19 -o "$bitcode/$1.bc" <<EOF
$layout
target triple = "amdgcn-amd-amdhsa"
@$2 = linkonce_odr protected local_unnamed_addr addrspace(4) constant i32 $3, align 4
EOF
}
for version in 400 500 600; do constant "oclc_abi_version_$version" __oclc_ABI_version "$version"; done
for arch in 942:9402 950:9500 9-4-generic:9402 10-3-generic:10300 1100:11000 1101:11001 1102:11002 1103:11003 1150:11500 \
  1151:11501 1152:11502 1153:11503 11-generic:11003 1200:12000 1201:12001 12-generic:12000; do
  constant "oclc_isa_version_${arch%%:*}" __oclc_ISA_version "${arch##*:}"
done
ln -s /usr/include "$work/include"
finish
