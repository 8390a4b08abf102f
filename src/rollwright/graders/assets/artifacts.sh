# Carries artifacts between boxes. Run by root: sh artifacts.sh pack ARCHIVE PATH... | unpack ARCHIVE. Paths are absolute.
set -eu
step=$1 archive=$2
shift 2
cd /
pack() {
    mkdir -p -m 700 "$(dirname "$archive")"
    tar -cf "$archive" -T /dev/null
    for path; do
        if [ -e "$path" ] || [ -L "$path" ]; then tar -rf "$archive" "./${path#/}"; fi
    done
}
unpack() { tar -xf "$archive" --no-same-owner; }
"$step" "$@"
