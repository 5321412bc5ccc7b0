// Prints the trees of checkpoints and checks every digest in them: node reader.mjs PATH...
//
// A reader of versions 1 and 2 of shardkeep's format, written from docs/format.md. PATH is a checkpoint directory or
// exchange files (model.safetensors, also if there are several). After the type and shape of an array it prints the
// digest of all its elements in C order, as the format stores them: little-endian, at least a byte for each.

import fs from 'node:fs'
import path from 'node:path'
import { Decompress } from 'fzstd'
import { createXXHash128 } from 'hash-wasm'

const BLOCK = 4194304 // raw bytes that one digest covers
const KINDS = ['jax', 'numpy', 'prng', 'per_process', 'value']
const hasher = await createXXHash128() // XXH3, 128 bits
const digestOf = bytes => hasher.init().update(bytes).digest('hex')
const sum = numbers => numbers.reduce((a, b) => a + b, 0), product = numbers => numbers.reduce((a, b) => a * b, 1)
const must = (condition, problem) => { if (!condition) throw new Error(problem) }

function readBytes(file, from, count) {
  const bytes = Buffer.alloc(count), opened = fs.openSync(file)
  let at = 0, got = 1
  for (; at < count && got > 0; at += got)
    got = fs.readSync(opened, bytes, at, Math.min(count - at, 1 << 30), from + at)
  fs.closeSync(opened)
  must(at === count, `${file} is too short`)
  return bytes
}

// The manifest, the directory that the names of its files are relative to, and the name of a single exchange file.
function readManifest(where) {
  const inDirectory = !where.endsWith('.safetensors'), several = !inDirectory && !fs.existsSync(where)
  const file = inDirectory ? path.join(where, 'manifest.json') : several ? `${where}.index.json` : where
  const single = inDirectory || several ? null : path.basename(file)
  const { size } = fs.statSync(file), length = single ? 8 + Number(readBytes(file, 0, 8).readBigUint64LE()) : size
  must(length <= size, `the header of ${file} is damaged`)
  const sealed = readBytes(file, 0, length)
  const root = JSON.parse(sealed.subarray(single === null ? 0 : 8))
  const manifest = inDirectory ? root : JSON.parse((root.__metadata__ ?? root.metadata).shardkeep)
  must([1, 2].includes(manifest.shardkeep), `${file} has version ${manifest.shardkeep} of the format`)
  const at = sealed.subarray(0, 200).indexOf('digest":"') + 9, digest = sealed.toString('latin1', at, at + 32)
  must(at > 8 && digestOf(sealed.fill('0', at, at + 32)) === digest, `${file} is damaged`)
  must(manifest.algorithm === 'xxh3-128' && manifest.block === BLOCK, `${file} has digests of another kind`)
  const trees = Object.values(manifest.trees)
  for (const tree of trees) tree.files = tree.files.flatMap(entry => Array.isArray(entry) ? [entry] : listSeries(entry))
  const named = trees.flatMap(tree => tree.files.map(([name]) => name))
  const both = [named, several ? Object.values(root.weight_map) : named].map(names => [...new Set(names)].sort().join())
  must(both[0] === both[1], `${file} and its manifest name different files`)
  return { ...manifest, directory: path.dirname(file), single, several }
}

// The files of a series, each as an entry of its own.
function listSeries({ names, first, sizes, header_lengths: header, header_digests: digests }) {
  const hex = Buffer.from(digests, 'base64').toString('hex').match(/.{32}/g)
  must(new Set([hex.length, header.length ?? hex.length, sizes.length]).size === 1, `the lists of ${names} differ in length`)
  return sizes.map((size, i) => [names.replace('*', `${first + i}`.padStart(5, 0)), size, header[i] ?? header, hex[i]])
}

function checkFiles({ directory, single, several, save }, { files }) {
  return files.map(([name, size, length, digest]) => {
    must(!/[\\\0]|(^|\/)\.{0,2}(\/|$)/.test(name) && [...name].length <= 4000, `the name ${name} is not allowed`)
    const file = path.join(directory, single ?? name)
    must(fs.statSync(file).size === size, `${file} does not have ${size} bytes`)
    const outside = path.relative(fs.realpathSync(directory), fs.realpathSync(file)).split(path.sep)[0] === '..'
    must(!outside || single !== null, `${file} is outside of the checkpoint`)
    must(digest !== null || single !== null, `${file} has no digest`)
    const start = readBytes(file, 0, length)
    must(digest === null || digestOf(start) === digest, `the first ${length} bytes of ${file} are damaged`)
    must(!several || JSON.parse(start.subarray(8)).__metadata__.shardkeep_save === save, `${file} is of another save`)
    return { file, size, length }
  })
}

// The pieces of each leaf in version 2. Those of a leaf in one table share a list of digests, and each takes its own.
function readTables(tree, files) {
  const found = tree.leaves.map(() => [])
  tree.tables.forEach((entry, table) => {
    const whole = files[entry.file], name = `table ${table}`
    must(!whole || whole.length === whole.size, `${name} has no digest`)
    const bytes = whole ? readBytes(whole.file, 0, whole.size) : Buffer.from(entry.data, 'base64')
    must(bytes.length >= 32 && bytes.toString('latin1', 0, 8) === 'skpiece2', `${name} is not a table`)
    const flags = bytes.readUint32LE(8), leaves = bytes.readUint32LE(12)
    must(flags === 0 || (flags === 1 && tree.compression !== null), `${name} has flags that are not allowed`)
    const pieces = Number(bytes.readBigUint64LE(16)), digests = Number(bytes.readBigUint64LE(24))
    must(bytes.length === 32 + (16 + 8 * flags) * pieces + 12 * leaves + 16 * digests, `${name} has another size`)
    let at = 32, row = 0, first = 0
    const u32 = length => Array.from({ length }, () => bytes.readUint32LE((at += 4) - 4))
    const u64 = length => Array.from({ length }, () => Number(bytes.readBigUint64LE((at += 8) - 8)))
    const offset = u64(pieces), stored = u64(flags * pieces)
    const leaf = u32(leaves), counts = u32(leaves), lengths = u32(leaves), cell = u32(pieces), file = u32(pieces)
    const digest = Array.from({ length: digests }, () => bytes.toString('hex', at, (at += 16)))
    must(sum(counts) === pieces && sum(lengths) === digests, `the columns of ${name} do not agree`)
    leaf.forEach((number, i) => {
      const own = digest.slice(first, (first += lengths[i]))
      for (const end = row + counts[i]; row < end; row++)
        found[number].push({ cell: cell[row], table, file: files[file[row] + (entry.base ?? 0)], offset: offset[row],
          stored: stored[row] || null, digests: own })
    })
  })
  return found
}

// The pieces of a leaf in version 1, and a grid that has them as its cells.
function toGrid({ shape, pieces: records }, files) {
  const pieces = records.map(piece => ({ start: shape.map(() => 0), shape, stored: null, table: 0, ...piece }))
  const grid = shape.map((_, axis) => [...new Set(pieces.map(({ start }) => start[axis]))].sort((a, b) => a - b))
  const numberOf = start => start.reduce((cell, from, i) => cell * grid[i].length + grid[i].indexOf(from), 0)
  return { grid, pieces: pieces.map(piece => ({ ...piece, cell: numberOf(piece.start), file: files[piece.file] })) }
}

function readPiece({ file: { file, size }, offset, stored, digests }, length) {
  must(offset + (stored ?? length) <= size, `a piece is beyond the end of ${file}`)
  let raw = readBytes(file, offset, stored ?? length)
  if (stored !== null) {
    const frame = raw
    let at = 0
    raw = Buffer.alloc(length)
    new Decompress(part => { raw.set(part, at); at += part.length }).push(frame, true) // `set` fails if it is too long
    must(at === length, `a frame in ${file} is too short`)
  }
  for (let at = 0; at < length; at += BLOCK)
    must(digestOf(raw.subarray(at, at + BLOCK)) === digests.shift(), `${file} is damaged`)
  return raw
}

// All elements of an array in C order.
function readArray({ shape, dtype, grid, pattern }, pieces, { patterns }) {
  const size = dtype === 'bool' ? 1 : Math.ceil(dtype.match(/\d+/)[0] / 8)
  const bounds = shape.map((length, axis) => {
    const part = grid?.[axis] ?? [0]
    return [...(part.length ? part : Array.from({ length: Math.ceil(length / part) }, (_, i) => i * part)), length]
  })
  const cells = new Set(pieces.map(({ cell }) => cell)), count = product(bounds.map(({ length }) => length - 1))
  must(cells.size === pieces.length && cells.size === count, 'an array has another number of pieces than its grid')
  const array = Buffer.alloc(product(shape) * size)
  for (const piece of pieces) {
    must(piece.cell < count && piece.table === (patterns?.[pattern]?.[piece.cell] ?? 0), 'a piece is in a wrong place')
    const start = [], extent = []
    for (let axis = shape.length - 1, rest = piece.cell; axis >= 0; axis--) {
      const parts = bounds[axis].length - 1
      start[axis] = bounds[axis][rest % parts]
      extent[axis] = bounds[axis][(rest % parts) + 1] - start[axis]
      rest = Math.floor(rest / parts)
    }
    must(String(piece.shape ?? extent) === String(extent), 'the pieces are not the cells of a grid')
    const raw = readPiece(piece, product(extent) * size), run = (extent.at(-1) ?? 1) * size
    for (let from = 0; from < raw.length; from += run) {
      const to = shape.reduce((above, length, axis) => above * length + start[axis]
        + Math.floor(from / size / product(extent.slice(axis + 1))) % extent[axis], 0)
      array.set(raw.subarray(from, from + run), to * size)
    }
  }
  must(pieces.every(({ digests }) => digests.length === 0), 'an array has too many digests')
  return array
}

// A plain value as text. Integers may be larger than a number of JavaScript; a float is shown as the manifest has it.
function show(value) {
  if (value === null || typeof value !== 'object') return JSON.stringify(value)
  const [[kind, content]] = Object.entries(value)
  if (kind === 'int') return String(content.startsWith('-') ? -BigInt(content.slice(1)) : BigInt(content))
  return kind === 'float' ? content : `${kind}(${[content].flat().join(', ')})`
}

function* describe(manifest) {
  for (const [prefix, tree] of Object.entries(manifest.trees)) {
    yield `tree ${JSON.stringify(prefix)}, ${tree.format}, ${tree.compression ?? 'not compressed'}, ${tree.created}`
    must(['safetensors', 'tensorstore'].includes(tree.format), 'a tree is in a format that this program does not read')
    must([null, 'zstd'].includes(tree.compression), 'a tree has a compression that this program does not know')
    const files = checkFiles(manifest, tree), tabled = manifest.shardkeep === 1 ? null : readTables(tree, files)
    for (const [number, leaf] of tree.leaves.entries()) {
      const { key, kind, dtype, shape, value } = leaf
      must(KINDS.includes(kind), `a leaf has the unknown kind ${kind}`)
      if (kind === 'value') yield `  ${show(key)} = ${show(value)}`
      else {
        const { grid, pieces } = tabled ? { grid: leaf.grid, pieces: tabled[number] } : toGrid(leaf, files)
        yield `  ${show(key)}: ${kind} ${dtype}[${shape}] ${digestOf(readArray({ ...leaf, grid }, pieces, tree))}`
      }
    }
  }
}

// What is read while a writer replaces the checkpoint may not belong together. Then the manifest has another save.
function check(where, manifest) {
  try {
    return [...describe(manifest)]
  } catch (error) {
    const now = readManifest(where)
    if (now.save === manifest.save) throw error
    return check(where, now)
  }
}

for (const where of process.argv.slice(2)) {
  try {
    console.log([where, ...check(where, readManifest(where)), 'every digest is right'].join('\n'))
  } catch (error) {
    console.log(`${where}\nerror: ${error.message}`)
    process.exitCode = 1
  }
}
