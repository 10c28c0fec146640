// A PNG on stdin becomes one of at most 256 colours on stdout: boards are flat, and a third of the size tells the same.
import { buffer } from 'node:stream/consumers';
import UPNG from 'upng-js';

const given = await buffer(process.stdin);
const image = UPNG.decode(given.buffer.slice(given.byteOffset, given.byteOffset + given.byteLength));
process.stdout.write(Buffer.from(UPNG.encode(UPNG.toRGBA8(image), image.width, image.height, 256)));
