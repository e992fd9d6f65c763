"""The bytes of format 1, one literal per kind of object: never regenerated, only added to.

What a test here holds against the code is what repositories in the world hold: if one fails,
the code is wrong, or the format has a new version.
"""

from __future__ import annotations

import pytest

from cas_ckpt.objects import pack, tensor_node, tree_node
from cas_ckpt.objects.codec import EncodingPolicy, decode_extent, encode_extent
from cas_ckpt.objects.commit import decode_commit, decode_layout
from cas_ckpt.objects.digest import Digest, chunk_id, leaf_digests, object_id
from cas_ckpt.objects.record import unseal
from cas_ckpt.objects.tree_node import ValueEntry, name_order
from cas_ckpt.objects.values import decode_value, encode_value
from tests.golden.fixed import (
    CHUNK,
    COMMIT,
    ENTRIES,
    FIRST_COMMIT,
    IDS,
    LAYOUT,
    MANY,
    NAME,
    NODES,
    PLAIN,
    SHARDED_LAYOUT,
    VALUES,
    an_id,
    extents,
    paged_tree,
    records,
)

BYTES: dict[str, str] = {
    "tree": (
        "93a4747265650184a46b696e64a464696374a56174747273c0a668656967687400a7656e74726965739b93fb04c401c0960003a4"
        "626f6f6c9000c4010196a5617272617903aa6e703a3c4d385b6e735d910101c408000000000000000096a76368756e6b656401a8"
        "62666c6f6174313692cd1000cd100000c420020202020202020202020202020202020202020202020202020202020202020296a6"
        "696e6c696e6503ad666c6f6174385f65346d33666e910300c40301020396a46c6f6e6702a575696e743891cd07d002c420040404"
        "040404040404040404040404040404040404040404040404040404040493a56f7074696d00c42001010101010101010101010101"
        "0101010101010101010101010101010101010196a673696e676c6502a7666c6f61743332921e2800c42003030303030303030303"
        "0303030303030303030303030303030303030303030393a47374657004c4010793a4c3bc2f7e04c405a47465787493c403eda080"
        "04c402c400"
    ),
    "tree of ranks": (
        "93a4747265650184a46b696e64a572616e6b73a56174747273c40d81aa776f726c645f73697a6502a668656967687400a7656e74"
        "7269657392930004c40581a2617400930104c40581a2617401"
    ),
    "tree of a sparse tensor": (
        "93a4747265650184a46b696e64aa7370617273655f636f6fa56174747273c41882a57368617065c70305920404a9636f616c6573"
        "636564c3a668656967687400a7656e74726965739196a7696e646963657303a5696e74363492020000c400"
    ),
    "empty tree": "93a4747265650184a46b696e64a464696374a56174747273c0a668656967687400a7656e747269657390",
    "tree over pages": (
        "93a4747265650184a46b696e64a464696374a56174747273c0a668656967687401a7656e74726965739593a66e616d65203005c4"
        "20a3c158c4cd7493d2a7bd3079ab5f741794e21742fcfca9352e57749e9648374993a86e616d652031343005c42098b2bc7ac823"
        "204076b893a0f176886c97c0e0c0d367991acd922b25bb1945c193a86e616d652032363105c42075682c27cd75d59a4ab08863e8"
        "f1ea8e5facfd2212a2c7868c858710d6e47d7493a76e616d6520343405c420f330f622a699613c494260fd2a79dbf5be97cbc4f6"
        "6053b25562f140c7c0447493a76e616d6520373905c420c6ec82a03730028a73d27ce60ec5e84bc0cf6f157f647b8d59490e92d3"
        "ae2984"
    ),
    "tree page": (
        "93a9747265652d706167650182a668656967687400a7656e7472696573dc001793a76e616d6520373904c401c093a66e616d6520"
        "3804c401c093a76e616d6520383004c401c093a76e616d6520383104c401c093a76e616d6520383204c401c093a76e616d652038"
        "3304c401c093a76e616d6520383404c401c093a76e616d6520383504c401c093a76e616d6520383604c401c093a76e616d652038"
        "3704c401c093a76e616d6520383804c401c093a76e616d6520383904c401c093a66e616d65203904c401c093a76e616d65203930"
        "04c401c093a76e616d6520393104c401c093a76e616d6520393204c401c093a76e616d6520393304c401c093a76e616d65203934"
        "04c401c093a76e616d6520393504c401c093a76e616d6520393604c401c093a76e616d6520393704c401c093a76e616d65203938"
        "04c401c093a76e616d6520393904c401c0"
    ),
    "tensor": (
        "93a674656e736f720185a463656c6c92cd0400cd02bca46c656166cdaf00a56474797065a7666c6f61743332a5736861706592cd"
        "0bb8cd02bca66368756e6b73c4600000000000000000000000000000000000000000000000000000000000000000010101010101"
        "01010101010101010101010101010101010101010101010101010202020202020202020202020202020202020202020202020202"
        "020202020202"
    ),
    "tensor over pages": (
        "93a674656e736f720185a463656c6c91ce00100000a46c656166ce00010000a56474797065a7666c6f61743332a57061676573c4"
        "40c1723dd1233e3d33b2a24aa5199ca7d701f1072a470e587483c89106790dcb9635273ad442a70a54b51569aa13b8df6d6509d9"
        "0ab2746324e51bcc0a85b40ef4a5736861706591ce10100000"
    ),
    "chunk-page": "93aa6368756e6b2d7061676501c4200000000000000000000000000000000000000000000000000000000000000000",
    "layout": (
        "93a66c61796f75740184a46d65736890a7616c69617365739292a76d6f64656c2f61a76d6f64656c2f6293a178a179a17aaa706c"
        "6163656d656e747380aa776f726c645f73697a6501"
    ),
    "layout of a mesh": (
        "93a66c61796f75740184a46d6573689292a264700492a2747002a7616c696173657390aa706c6163656d656e747381a76d6f6465"
        "6c2f7792a97265706c6963617465a87368617264283029aa776f726c645f73697a6508"
    ),
    "commit": (
        "93a6636f6d6d6974018aa46d657461c40d81a26c72cb3fb999999999999aa4726f6f74c4200a0a0a0a0a0a0a0a0a0a0a0a0a0a0a"
        "0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0aa47374657064a5737461747382ab6e756d5f656e747269657303ab746f74616c5f6279"
        "746573cf0000000200000000a6617574686f72a76d654068657265a66c61796f7574c4200d0d0d0d0d0d0d0d0d0d0d0d0d0d0d0d"
        "0d0d0d0d0d0d0d0d0d0d0d0d0d0d0d0da76d657373616765a8666972737420c3bca76d65747269637382a3616363cb3fd0000000"
        "000000a46c6f7373cb3ff8000000000000a7706172656e747392c4200b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b"
        "0b0b0b0b0b0b0b0bc4200c0c0c0c0c0c0c0c0c0c0c0c0c0c0c0c0c0c0c0c0c0c0c0c0c0c0c0c0c0c0c0ca774696d655f7573cf00"
        "065bfeda27c240"
    ),
    "first commit": (
        "93a6636f6d6d6974018aa46d657461c0a4726f6f74c4200a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a"
        "0a0a0aa473746570c0a5737461747380a6617574686f72a0a66c61796f7574c4200d0d0d0d0d0d0d0d0d0d0d0d0d0d0d0d0d0d0d"
        "0d0d0d0d0d0d0d0d0d0d0d0d0da76d657373616765a0a76d65747269637380a7706172656e747390a774696d655f757300"
    ),
    "leaf digests": (
        "f16c9f867cc5384c7329aa4481eba6518c50ab21bf8a615e26bad55e57569b2cf16c9f867cc5384c7329aa4481eba6518c50ab21"
        "bf8a615e26bad55e57569b2c"
    ),
    "header of a data pack": (
        "434153434b50414b0100010000000000000102030405060708090a0b0c0d0e0f0000000000000000000000000000000000000000"
        "00000000289ae554546d40c1"
    ),
    "header of a meta pack": (
        "434153434b50414b0100020000000000000102030405060708090a0b0c0d0e0f0000000000000000000000000000000000000000"
        "00000000e2597491aa3dc862"
    ),
    "entry header of a node": (
        "434b4501040000007000000000000000280000000000000028000000000000000000000000000000141414141414141414141414"
        "14141414141414141414141414141414141414140000000000000000000000000000000000000000000000000000000000000000"
        "40090bb7abde1411"
    ),
    "entry header of a chunk": (
        "434b450101000000b000000000000100000002000000000000000200000000000000000002000000c4539157ce863488fb6e063f"
        "72e42557c8fa0d13cc770b402fd914f84508537b0000000000000000000000000000000000000000000000000000000000000000"
        "f16c9f867cc5384c7329aa4481eba6518c50ab21bf8a615e26bad55e57569b2cf16c9f867cc5384c7329aa4481eba6518c50ab21"
        "bf8a615e26bad55e57569b2c8d072de4072ee8d7"
    ),
    "entry header of a delta": (
        "434b450101000300b000000000000100000002000000000063000000000000000100000001000000c4539157ce863488fb6e063f"
        "72e42557c8fa0d13cc770b402fd914f84508537b1515151515151515151515151515151515151515151515151515151515151515"
        "f16c9f867cc5384c7329aa4481eba6518c50ab21bf8a615e26bad55e57569b2cf16c9f867cc5384c7329aa4481eba6518c50ab21"
        "bf8a615e26bad55e57569b2cbb6a79b7b27a799d"
    ),
    "directory": (
        "14141414141414141414141414141414141414141414141414141414141414140000000000000000000000000000000000000000"
        "00000000000000000000000040000000000000002800000000000000280000000000000070000000000000000000000000000000"
        "0400000000000000c4539157ce863488fb6e063f72e42557c8fa0d13cc770b402fd914f84508537b000000000000000000000000"
        "0000000000000000000000000000000000000000d80000000000000000000200000000000000020000000000b000000000000100"
        "00000000020000000100000000000000c4539157ce863488fb6e063f72e42557c8fa0d13cc770b402fd914f84508537b15151515"
        "15151515151515151515151515151515151515151515151515151515880102000000000000000200000000006300000000000000"
        "b00000000000010001000000010000000100030000000000"
    ),
    "trailer": (
        "434153434b454e440100010000000000000102030405060708090a0b0c0d0e0f9b0202000000000003000000000000004b040200"
        "00000000f4029ce675f01bd277d730a7b000da2c80e598f2b3632d459fc0215cf955c2a5b08689c6740057fc"
    ),
    "record config": (
        "434153434b5245437e47926264cd25e5665a2b7f74842e6a5277ac0b3d46c3c1d99ff782fc935e4794a6636f6e66696701a6636f"
        "6e66696786a56e6f6e6365c410000102030405060708090a0b0c0d0e0fa8656e636f64696e67a46175746fa873746f72655f6964"
        "d9203031323334353637383961626364656630313233343536373839616263646566aa7061636b5f6279746573ce20000000ae64"
        "656661756c745f6272616e6368a46d61696eb2636f6e646974696f6e616c5f777269746573a8686f6e6f75726564"
    ),
    "record placeholder": (
        "434153434b524543dfab8a5bdd4a6340c9f08a15e0a0d9a87b43358dc6d78d38da9a877413964d4794a372656601b3726566732f"
        "68656164732f6d61696e2e72656685a36c6f6790a56e6f6e6365c410000102030405060708090a0b0c0d0e0fa6746172676574c0"
        "aa67656e65726174696f6effb067656e65726174696f6e5f6e6f6e6365c400"
    ),
    "record branch": (
        "434153434b52454395261848761571dbe22c86f3c854e0164422bf70f884ab80661811b6fb5655fa94a372656601b3726566732f"
        "68656164732f6d61696e2e72656685a36c6f6790a56e6f6e6365c410000102030405060708090a0b0c0d0e0fa6746172676574c4"
        "201e1e1e1e1e1e1e1e1e1e1e1e1e1e1e1e1e1e1e1e1e1e1e1e1e1e1e1e1e1e1e1eaa67656e65726174696f6e03b067656e657261"
        "74696f6e5f6e6f6e6365c410000102030405060708090a0b0c0d0e0f"
    ),
    "record tag": (
        "434153434b524543f5250d1349d20e4a0737c5538c4242196e296115d8e675d2545fc5a9fcf0d5b094a372656601b0726566732f"
        "746167732f76312e72656685a36c6f679195cf00065bfeda2d8120c0c4201f1f1f1f1f1f1f1f1f1f1f1f1f1f1f1f1f1f1f1f1f1f"
        "1f1f1f1f1f1f1f1f1f1fb07461673a2073657420746f206d61696ea76d654068657265a56e6f6e6365c410000102030405060708"
        "090a0b0c0d0e0fa6746172676574c4201f1f1f1f1f1f1f1f1f1f1f1f1f1f1f1f1f1f1f1f1f1f1f1f1f1f1f1f1f1f1f1faa67656e"
        "65726174696f6e04b067656e65726174696f6e5f6e6f6e6365c410000102030405060708090a0b0c0d0e0f"
    ),
    "record name": (
        "434153434b52454350df6c88bbed7a5ee56bdfff1297e34c09005fb839f3a7a366e16f51dcce118494a46e616d6501b46e616d65"
        "732f68656164732f6d61696e2e72656680"
    ),
    "record gc-state": (
        "434153434b5245432550f33433a996f0634d5f261858934fdc09e28712f21de40e03fd4e97e3d78394a867632d737461746501a8"
        "67632f737461746585a56e6f6e6365c410000102030405060708090a0b0c0d0e0fa57068617365a469646c65a9636f6e64656d6e"
        "656490aa67656e65726174696f6e00b067656e65726174696f6e5f6e6f6e6365c410000102030405060708090a0b0c0d0e0f"
    ),
    "record gc-state condemned": (
        "434153434b52454396bdec36f458b9575dd0d4fd5bdae070ceae0b164c23f773192abc54b9b3648f94a867632d737461746501a8"
        "67632f737461746585a56e6f6e6365c410000102030405060708090a0b0c0d0e0fa57068617365a9636f6e64656d6e6564a9636f"
        "6e64656d6e656491d92e7061636b732f30302f30303030303030303030303030303030303030303030303030303030303030302e"
        "64617461aa67656e65726174696f6e09b067656e65726174696f6e5f6e6f6e6365c410000102030405060708090a0b0c0d0e0f"
    ),
    "extent raw": "736f6d65206279746573",
    "extent zero": "",
    "extent constant": "0000803f",
    "extent zstd": "28b52ffd60e8020d0100c87468652073616d6520776f72647320616761696e20616e6420010031e76a8e01",
    "extent planes": (
        "040113000000011d00000000e8030000011f00000028b52ffd60e8024d00001000000100e32b800528b52ffd60e8029d00003000"
        "00804080c00300e13b75f839eaf22980050080004080a0c0e0001020304050607080889098a0a8b0b8c0c8d0d8e0e8f0f8000408"
        "0c1014181c2024282c3034383c4044484c5054585c6064686c7074787c80828486888a8c8e90929496989a9c9ea0a2a4a6a8aaac"
        "aeb0b2b4b6b8babcbec0c2c4c6c8caccced0d2d4d6d8dadcdee0e2e4e6e8eaeceef0f2f4f6f8fafcfe000102030405060708090a"
        "0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e"
        "3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172"
        "737475767778797a7b7c7d7e7f80808181828283838484858586868787888889898a8a8b8b8c8c8d8d8e8e8f8f90909191929293"
        "939494959596969797989899999a9a9b9b9c9c9d9d9e9e9f9fa0a0a1a1a2a2a3a3a4a4a5a5a6a6a7a7a8a8a9a9aaaaababacacad"
        "adaeaeafafb0b0b1b1b2b2b3b3b4b4b5b5b6b6b7b7b8b8b9b9bababbbbbcbcbdbdbebebfbfc0c0c1c1c2c2c3c3c4c4c5c5c6c6c7"
        "c7c8c8c9c9cacacbcbcccccdcdcececfcfd0d0d1d1d2d2d3d3d4d4d5d5d6d6d7d7d8d8d9d9dadadbdbdcdcdddddededfdfe0e0e1"
        "e1e2e2e3e3e4e4e5e5e6e6e7e7e8e8e9e9eaeaebebececededeeeeefeff0f0f1f1f2f2f3f3f4f4f5f5f6f6f7f7f8f8f9f9fafafb"
        "fbfcfcfdfdfefeffff000000000101010102020202030303030404040405050505060606060707070708080808090909090a0a0a"
        "0a0b0b0b0b0c0c0c0c0d0d0d0d0e0e0e0e0f0f0f0f10101010111111111212121213131313141414141515151516161616171717"
        "1718181818191919191a1a1a1a1b1b1b1b1c1c1c1c1d1d1d1d1e1e1e1e1f1f1f1f20202020212121212222222223232323242424"
        "2425252525262626262727272728282828292929292a2a2a2a2b2b2b2b2c2c2c2c2d2d2d2d2e2e2e2e2f2f2f2f30303030313131"
        "3132323232333333333434343435353535363636363737373738383838393939393a3a3a3a3b3b3b3b3c3c3c3c3d3d3d3d3e3e3e"
        "3e3f3f3f3f404040404141414142424242434343434444444445454545464646464747474748484848494949494a4a4a4a4b4b4b"
        "4b4c4c4c4c4d4d4d4d4e4e4e4e4f4f4f4f5050505051515151525252525353535354545454555555555656565657575757585858"
        "58595959595a5a5a5a5b5b5b5b5c5c5c5c5d5d5d5d5e5e5e5e5f5f5f5f6060606061616161626262626363636364646464656565"
        "65666666666767676768686868696969696a6a6a6a6b6b6b6b6c6c6c6c6d6d6d6d6e6e6e6e6f6f6f6f7070707071717171727272"
        "727373737374747474757575757676767677777777787878787979797928b52ffd60e802ad000038003f4041424344051000e4aa"
        "f0a9c713ab421802"
    ),
    "value none": "c0",
    "value true": "c3",
    "value int": "f9",
    "value large int": "c70901400000000000000000",
    "value float": "cb3fb999999999999a",
    "value nan": "cb7ff8000000000000",
    "value complex": "d8033ff0000000000000c000000000000000",
    "value str": "a2c3bc",
    "value bytes": "c40200ff",
    "value list": "920191cb4000000000000000",
    "value tuple": "c705059201d40590",
    "value dict": "82a1618103c0a16201",
    "value set": "d60693010203",
    "value float32": "c70b1192a33c6634c4040000c03f",
    "value range": "d60d93000a02",
}

IDENTITIES: dict[str, str] = {
    "tree": "51f770435d1f2098255dd1adb4476392cffac05e42dc0dd84a2314e20ab70b96",
    "tree of a sparse tensor": "af559879a162eaee34cf3d597ed076fc34b4db5f9483319c88bf6254485a722c",
    "tree of ranks": "0d454334e4107e5d4709fd5950c30e6a755fcf75efaf1264b561c2c127b87727",
    "empty tree": "07b5c8a18e4547c8c9e8518c9d1350b59bead3f6235e4b53633dcee759cdd003",
    "tree over pages": "b7d25f2bf6cfe5ddcde928bf6aa1fe1961819d3c1b4a15634e2b4c6d80627b41",
    "tree page": "c6ec82a03730028a73d27ce60ec5e84bc0cf6f157f647b8d59490e92d3ae2984",
    "tensor": "e4e5372da62486ac9dfdfbb6134f36e6de6e58877b0994bf5a07b92e88d3c144",
    "tensor over pages": "cda162bea6f6f627af118737508daa711e8161005f1d058b5f82903a76eda656",
    "chunk-page": "35273ad442a70a54b51569aa13b8df6d6509d90ab2746324e51bcc0a85b40ef4",
    "layout": "e51588574ac6a68de0d7601d9b685f51dd8e11d10cf99c715c5d0cfcb279155f",
    "layout of a mesh": "64737f4630e68c41b9f3f6cdf8ec9fd14aba8b61fc3224f41cd9780986e87c3d",
    "commit": "e5561ce9cb43e8c0aab21f1b4472b7546713eae81bbaecb85840258e169ba29d",
    "first commit": "6a6be367a79ccc68b0ef96621a552e40aed95bf41c571563630291d37fb45107",
    "pages of a long tree": (
        "a3c158c4cd7493d2 98b2bc7ac8232040 75682c27cd75d59a f330f622a699613c c6ec82a03730028a b7d25f2bf6cfe5dd"
    ),
    "chunk": "c4539157ce863488fb6e063f72e42557c8fa0d13cc770b402fd914f84508537b",
    "chunk of nothing": "ad19c4f2e17d7622a4d73bf8c1f5cb2f6ff865352f8297e6d81276b390f7317a",
}


def literal(name: str) -> bytes:
    return bytes.fromhex(BYTES[name])


# --- nodes and their ids ---------------------------------------------------------------------


@pytest.mark.parametrize("name", NODES)
def test_a_node_has_these_bytes_and_this_id(name: str) -> None:
    made = NODES[name]()
    assert made.data == literal(name)
    assert made.digest.hex() == IDENTITIES[name]
    assert object_id(made.kind.label, literal(name)).hex() == IDENTITIES[name]


def test_every_page_of_a_long_tree_has_this_id() -> None:
    assert [made.digest.hex()[:16] for made in paged_tree()] == IDENTITIES["pages of a long tree"].split()


def test_trees_are_read_from_these_bytes() -> None:
    found = tree_node.decode_tree(literal("tree"))
    assert (found.kind, found.attrs, found.height) == ("dict", None, 0)
    assert found.entries == tuple(sorted(ENTRIES, key=lambda entry: name_order(entry.name)))
    sparse = tree_node.decode_tree(literal("tree of a sparse tensor"))
    assert sparse.kind == "sparse_coo"
    assert decode_value(sparse.attrs or b"") == {"shape": (4, 4), "coalesced": True}
    assert tree_node.decode_tree(literal("empty tree")).entries == ()


def test_values_of_ranks_are_read_from_these_bytes() -> None:
    found = tree_node.decode_tree(literal("tree of ranks"))
    assert (found.kind, decode_value(found.attrs or b"")) == ("ranks", {"world_size": 2})
    assert found.entries == tuple(ValueEntry(rank, encode_value({"at": rank}, key="")) for rank in range(2))


def test_pages_are_read_from_these_bytes() -> None:
    top = tree_node.decode_tree(literal("tree over pages"))
    assert (top.height, [page.node for page in top.pages]) == (1, [made.digest for made in paged_tree()[:-1]])
    page = tree_node.decode_tree(literal("tree page"), page=True)
    assert page.height == 0
    assert set(page.entries) <= set(MANY)


def test_tensors_are_read_from_these_bytes() -> None:
    found = tensor_node.decode_tensor(literal("tensor"))
    assert (str(found.spec), found.chunks, found.pages) == ("float32[3000, 700]", tuple(IDS[:3]), ())
    assert (found.grid.cell, found.grid.leaf_bytes) == ((1024, 700), 44800)
    paged = tensor_node.decode_tensor(literal("tensor over pages"))
    assert (paged.chunks, len(paged.pages), paged.grid.cell) == ((), 2, (1 << 20,))
    assert tensor_node.decode_chunk_page(literal("chunk-page")) == (IDS[256],)


def test_commits_and_layouts_are_read_from_these_bytes() -> None:
    assert decode_commit(literal("commit")) == COMMIT
    assert decode_commit(literal("first commit")) == FIRST_COMMIT
    assert decode_layout(literal("layout")) == LAYOUT
    assert decode_layout(literal("layout of a mesh")) == SHARDED_LAYOUT


# --- chunks ----------------------------------------------------------------------------------


def test_known_data_has_these_leaf_digests_and_this_chunk_id() -> None:
    digests = leaf_digests(memoryview(CHUNK), 65536)
    assert b"".join(digests) == literal("leaf digests")
    assert chunk_id(len(CHUNK), digests).hex() == IDENTITIES["chunk"]
    assert chunk_id(0, []).hex() == IDENTITIES["chunk of nothing"]


# --- packs -----------------------------------------------------------------------------------


def chunk_extents() -> tuple[list[pack.ExtentInfo], list[Digest]]:
    data = literal("leaf digests")
    digests = [Digest(data[:32]), Digest(data[32:])]
    return extents(Digest(bytes.fromhex(IDENTITIES["chunk"])), digests), digests


@pytest.mark.parametrize("kind", pack.PackKind)
def test_a_pack_header_has_these_bytes(kind: pack.PackKind) -> None:
    assert pack.encode_header(NAME, kind) == literal(f"header of a {kind.suffix} pack")
    assert pack.decode_header(literal(f"header of a {kind.suffix} pack")) == (NAME, kind)


def test_entry_headers_have_these_bytes() -> None:
    infos, digests = chunk_extents()
    for name, info in zip(("node", "chunk", "delta"), infos, strict=True):
        theirs = digests if name != "node" else []
        assert pack.encode_entry_header(info, theirs) == literal(f"entry header of a {name}")
        found = pack.decode_entry_header(literal(f"entry header of a {name}"), offset=info.offset)
        assert found == (info, theirs)


def test_directory_and_trailer_have_these_bytes() -> None:
    infos, _ = chunk_extents()
    directory, trailer = literal("directory"), literal("trailer")
    assert pack.encode_directory(infos) == directory
    assert pack.encode_trailer(NAME, pack.PackKind.DATA, directory, directory_offset=infos[-1].end) == trailer
    size = infos[-1].end + len(directory) + len(trailer)
    found = pack.decode_trailer(trailer, size_bytes=size, key="pack")
    assert sorted(pack.decode_directory(directory, found, key="pack"), key=lambda info: info.offset) == infos


# --- records ---------------------------------------------------------------------------------


def test_records_have_these_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = records(monkeypatch)
    assert {name: data.hex() for name, data in made.items()} == {name: BYTES[f"record {name}"] for name in made}


def test_records_are_read_from_these_bytes() -> None:
    config = unseal("config", literal("record config"), version=1, key="config")
    assert config == {
        "store_id": "0123456789abcdef" * 2, "default_branch": "main", "encoding": "auto", "pack_bytes": 1 << 29,
        "conditional_writes": "honoured", "nonce": NAME,
    }  # fmt: skip
    placeholder = unseal("ref", literal("record placeholder"), version=1, key="refs/heads/main.ref")
    assert placeholder == {"target": None, "generation": -1, "generation_nonce": b"", "nonce": NAME, "log": []}
    branch = unseal("ref", literal("record branch"), version=1, key="refs/heads/main.ref")
    assert branch == {
        "target": an_id(30), "generation": 3, "generation_nonce": NAME, "nonce": NAME, "log": []
    }  # fmt: skip
    tag = unseal("ref", literal("record tag"), version=1, key="refs/tags/v1.ref")
    assert tag["log"] == [[1_790_000_000_500_000, None, an_id(31), "tag: set to main", "me@here"]]
    assert unseal("name", literal("record name"), version=1, key="names/heads/main.ref") == {}
    gc = unseal("gc-state", literal("record gc-state condemned"), version=1, key="gc/state")
    assert gc == {
        "generation": 9, "generation_nonce": NAME, "phase": "condemned",
        "condemned": ["packs/00/" + "0" * 32 + ".data"], "nonce": NAME,
    }  # fmt: skip


# --- extents and values ----------------------------------------------------------------------


@pytest.mark.parametrize("name", PLAIN)
def test_an_extent_is_read_from_these_bytes(name: str) -> None:
    encoding, plain = PLAIN[name]
    assert bytes(decode_extent(encoding, literal(f"extent {name}"), num_bytes=len(plain))) == plain


@pytest.mark.parametrize("name", ["raw", "zero", "constant"])
def test_an_extent_that_no_library_compresses_has_these_bytes(name: str) -> None:
    encoding, plain = PLAIN[name]
    made = encode_extent(plain, policy=EncodingPolicy.RAW, item_bytes=4)
    assert (made.encoding, bytes(made.payload)) == (encoding, literal(f"extent {name}"))


@pytest.mark.parametrize("name", VALUES)
def test_a_value_has_these_bytes(name: str) -> None:
    data = literal(f"value {name}")
    assert encode_value(VALUES[name], key="") == data
    back = decode_value(data)
    assert type(back) is type(VALUES[name])
    assert encode_value(back, key="") == data
