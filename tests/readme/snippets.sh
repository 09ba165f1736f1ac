#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# snippets.sh MARKDOWN LANGUAGE FOLDER COMPILER...: compiles every code block of that language (cpp or cuda) in a file
# of the documentation, and runs those that have a main. A block without #include is compiled behind engine.hpp, which
# holds what an engine would bring; one that is no declaration is marked `statements` behind the language.
set -eu
markdown=$1 language=$2 folder=$3
shift 3
here=$(dirname "$0")
extension=cpp
[ "$language" = cpp ] || extension=cu
rm -rf "$folder"
mkdir -p "$folder"

awk -v language="$language" -v folder="$folder" -v extension="$extension" '
  /^```/ && !inside && substr($1, 4) == language {
    inside = 1; statements = ($2 == "statements"); text = ""; includes = 0; begin = NR; next
  }
  /^```/ && !inside { other = !other; next }
  /^```/ && inside {
    inside = 0
    file = folder "/line_" begin "." extension
    if (!includes) print "#include \"engine.hpp\"" > file
    if (statements) printf "STATEMENTS(line_%d) {\n", begin > file
    printf "#line %d\n%s", begin + 1, text > file
    if (statements) print "}" > file
    close(file)
    next
  }
  inside { text = text $0 "\n"; if ($0 ~ /^#include/) includes = 1 }' "$markdown"

found=0
for file in "$folder"/*."$extension"; do
  [ -e "$file" ] || continue
  found=$((found + 1))
  program=${file%."$extension"}
  if grep -q '^int main' "$file"; then
    "$@" -I"$here" "$file" -o "$program" || { echo "$markdown: $file does not compile"; exit 1; }
    [ "$language" != cpp ] || "$program" || { echo "$markdown: $file fails"; exit 1; }
  else
    "$@" -I"$here" -c "$file" -o "$program.o" || { echo "$markdown: $file does not compile"; exit 1; }
  fi
done
[ "$found" -gt 0 ] || { echo "$markdown holds no block of $language"; exit 1; }
echo "$markdown: $found blocks of $language"
