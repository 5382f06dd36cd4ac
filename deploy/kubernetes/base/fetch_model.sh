#!/bin/sh
# Puts a model where the daemon reads it: MODEL_FILE, from MODEL_URL, if its SHA-256 is MODEL_SHA256. One that is there
# already stays. A file of another digest never gets this name, and the pod does not start.
set -eu

digest() { sha256sum "$1" | cut -d ' ' -f 1; }

if [ -f "$MODEL_FILE" ] && [ "$(digest "$MODEL_FILE")" = "$MODEL_SHA256" ]; then
  echo "$MODEL_FILE is there"
  exit 0
fi
part=$MODEL_FILE.part
curl --disable --fail --location --no-progress-meter --proto '=http,https' --retry 5 --connect-timeout 10 \
  --speed-limit 1024 --speed-time 60 --output "$part" "$MODEL_URL"
found=$(digest "$part")
if [ "$found" != "$MODEL_SHA256" ]; then
  rm "$part"
  echo "MODEL_URL gave a file whose SHA-256 is $found, and MODEL_SHA256 is $MODEL_SHA256" >&2
  exit 1
fi
mv "$part" "$MODEL_FILE"
echo "$MODEL_FILE was fetched"
