// What the type of a board has to reject. If it accepts one of these, the check fails on the unused expectation.

import type { Board } from "./board";

type Panel = Extract<Board["panels"][number], { type: "stat" }>;
type Table = Extract<Board["panels"][number], { type: "table" }>;

// @ts-expect-error no such field of a board
export const field: Pick<Board, "title"> & Partial<Board> = { title: "", titel: "" };
// @ts-expect-error no such member of an enumeration of numbers
export const tooltip: Board["graphTooltip"] = 7;
// @ts-expect-error no such member of an enumeration of text
export const colour: Panel["options"]["colorMode"] = "colour";
// @ts-expect-error no such type of panel
export const type: Board["panels"][number]["type"] = "singlestat";
// @ts-expect-error no such option of a panel
export const option: Partial<Panel["options"]> = { colourMode: "value" };
// @ts-expect-error no such property of an override
export const property: Table["fieldConfig"]["overrides"][number]["properties"][number] = { id: "custom.cell", value: "" };
// @ts-expect-error no such value of a property of an override
export const value: Table["fieldConfig"]["overrides"][number]["properties"][number] = { id: "unit", value: 1 };
