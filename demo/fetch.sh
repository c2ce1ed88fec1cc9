#!/bin/sh
# Fetches what the demo works on, as Debian distributes it, and unpacks it below /opt/demo:
# source packages to sources/, the Python documentation to site/. apt checks the signatures.
set -eu

# Source packages need `deb-src`; an image's own sources have `deb` only.
if [ -z "${APT_CONFIG:-}" ]; then
    sed -i 's/^Types: deb$/Types: deb deb-src/' /etc/apt/sources.list.d/*.sources
fi
apt-get update -qq

work=$(mktemp -d)
mkdir -p /opt/demo/sources /opt/demo/site
cd "$work"

# A mirror may not have the newest version yet, so older ones are tried, too.
fetch_source() {
    for version in $(apt-cache showsrc --only-source "$1" | sed -n 's/^Version: //p' | sort -Vru); do
        if apt-get source -qq --download-only "$1=$version"; then
            mkdir "/opt/demo/sources/$2"
            tar -x -f "$(ls "$1"_*.orig.tar.* | grep -v '\.asc$')" \
                -C "/opt/demo/sources/$2" --strip-components 1
            return
        fi
    done
    echo "no version of the source package $1 could be fetched" >&2
    exit 1
}
fetch_source libzstd zstd
fetch_source lua5.4 lua

documentation=$(apt-cache depends python3-doc | sed -n 's/.*Depends: \(python3\.[0-9]*-doc\).*/\1/p')
apt-get download -qq "$documentation"
dpkg-deb --extract "$documentation"_*.deb "$work/unpacked"
mv "$work/unpacked/usr/share/doc/${documentation%-doc}/html"/* /opt/demo/site/

cd /
rm -rf "$work" /var/lib/apt/lists/*
