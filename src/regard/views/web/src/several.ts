// Several at once, but not all: a browser has six connections to a server, and what is on screen needs some of them.

const AT_ONCE = 3;

/** Do work on items in order, a few at a time, until done or no longer wanted. */
export async function several<T>(
  items: readonly T[],
  work: (item: T) => Promise<void>,
  wanted: () => boolean,
): Promise<void> {
  let next = 0;
  const hand = async (): Promise<void> => {
    while (next < items.length && wanted()) await work(items[next++]);
  };
  await Promise.all(Array.from({ length: AT_ONCE }, hand));
}
